"""Fingerprints: what changes an object changes them, and what cannot does not."""

import os
import subprocess
import sys

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


def test_files_of_one_name_have_one_fingerprint(tmp_path):
    """Fault: two files of one name stood in the order of a set, so that a kernel of a user's had
    another fingerprint in the next process; and it hung on the system's encoding.
    """
    found = set()
    for one, other, seed in (("a", "b", "1"), ("a", "b", "2"), ("d", "c", "1"), ("d", "c", "3")):
        for folder, text in ((one, "int x; // é"), (other, "int y;")):
            (tmp_path / folder).mkdir(exist_ok=True)
            (tmp_path / folder / "k.h").write_text(text, encoding="utf-8")
        paths = tuple(str(tmp_path / folder / "k.h") for folder in (one, other))
        code = f"from gdntune.kernels.fingerprint import fingerprint; print(fingerprint({paths!r}))"
        env = {**os.environ, "PYTHONHASHSEED": seed, "LC_ALL": "C", "PYTHONUTF8": "0"}
        done = subprocess.run(
            [sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True
        )
        found.add(done.stdout)
    assert len(found) == 1


def test_stamps_are_of_these_files_alone(monkeypatch):
    """A bundle's word on fingerprints is taken where it was given of the same files: it saves 300
    ms of a first call.
    """
    sources = kernels.get("recurrent").sources
    monkeypatch.setattr(fp, "_STAMPED", {})
    stamped = fp.stamp([sources, ("/outside/the/package.h",)])
    assert stamped == {"digest": fp.digest(), " ".join(sources): fp.fingerprint(sources)}
    fp.believe({**stamped, "digest": "of other files"})
    assert not fp._STAMPED
    fp.believe(stamped)
    monkeypatch.setattr(fp, "_computed", lambda sources: "computed")
    assert fp.fingerprint.__wrapped__(sources) == stamped[" ".join(sources)]
    assert fp.fingerprint.__wrapped__(("another",)) == "computed"
