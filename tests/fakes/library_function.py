"""A library's function, which keeps what it is called with."""

import inspect

import torch


class Recorder:
    """Stands in for a library's function, with its signature: keeps its arguments, returns what it
    is told to.
    """

    def __init__(self, parameters):
        self.signature = signature(parameters)
        self.arguments = {}

    def __call__(self, *positional, **arguments):
        self.arguments = dict(self.signature.bind(*positional, **arguments).arguments)
        return torch.zeros(1), torch.zeros(1)

    def same(self, x):
        """The names of the arguments that share x's memory, so that a call writes to x itself."""
        return {
            name
            for name, y in self.arguments.items()
            if isinstance(y, torch.Tensor)
            and y.untyped_storage().data_ptr() == x.untyped_storage().data_ptr()
        }


def signature(parameters):
    """The signature that a line of `fakes.signatures` says."""
    found, kind = [], inspect.Parameter.POSITIONAL_OR_KEYWORD
    for word in parameters.split():
        if word == "*":
            kind = inspect.Parameter.KEYWORD_ONLY
        elif word.startswith("**"):
            found.append(inspect.Parameter(word[2:], inspect.Parameter.VAR_KEYWORD))
        else:
            default = None if word.endswith("=") else inspect.Parameter.empty
            found.append(inspect.Parameter(word.removesuffix("="), kind, default=default))
    return inspect.Signature(found)
