"""How a report looks: a document of text and grids, as Markdown and in the terminal."""
