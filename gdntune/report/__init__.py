"""How results look: Markdown, terminal, HTML."""
