"""Fingerprints: what changes an object changes them, and what cannot does not."""

from gdntune import kernels
from gdntune.kernels import fingerprint as fp

SOURCE = '''"""Module."""

# a comment
def f(x):
    """Docstring."""
    return x + 1  # trailing
'''


def test_comments_docstrings_and_blank_lines_do_not_count():
    """A better comment does not make a measured table stale."""
    assert fp.stripped_python(SOURCE) == "def f(x):\n    return x + 1"
    assert fp.stripped_cpp("int a; // one\n/* two\nlines */\n\nint b;") == "int a;\nint b;"


def test_code_counts():
    """A changed constant is another fingerprint, a hash sign in a string is no comment."""
    assert fp.stripped_python(SOURCE) != fp.stripped_python(SOURCE.replace("+ 1", "+ 2"))
    assert fp.stripped_python("x = '# kept'\n") == "x = '# kept'"


def test_what_a_kernel_imports_counts():
    """The gates are part of recurrent; its knobs' config is not, since it decides no object's
    bytes.
    """
    found = fp.closure(kernels.get("recurrent").sources)
    assert "gdntune.kernels.gates" in found
    assert not any(name.endswith("_config") for name in found)
    assert any(name.endswith(".h") for name in fp.closure(kernels.get("cpu_recurrent").sources))


def test_kernels_have_fingerprints_of_their_own():
    """Each kernel's fingerprint is its own."""
    found = {**kernels.fingerprints("cuda"), **kernels.fingerprints("cpu")}
    assert len(set(found.values())) == len(found) == len(kernels.KERNELS)
