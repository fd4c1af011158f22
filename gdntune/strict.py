"""Plain data from YAML or JSON to frozen structs; a refusal names the source, the path, the value
and what is expected.
"""

import difflib
import json
import math
import re
import reprlib
from collections.abc import Callable, Iterator
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import msgspec

from gdntune import __version__
from gdntune.errors import GdntuneError, listed, one_of

_WORDS = {
    "object": "a mapping",
    "array": "a list",
    "str": "text",
    "int": "an integer",
    "float": "a number",
    "bool": "true or false",
}
# Where a document says its schema and who wrote it; a table's rules are hundreds of kilobytes.
_HEAD = 4096
# No key of a document: what `refuse_odd_json` notes an object's double key under.
_MARK = "\0twice"
_short = reprlib.Repr()
_short.maxstring = _short.maxother = 60
_short.maxdict = _short.maxlist = 4
_short.maxlevel = 2


def convert(raw: Any, kind: Any, source: str, error: type[GdntuneError], path: str = "$") -> Any:
    """`raw` as a `kind`, with no coercion; raises `error`. `path` is where `raw` stands in
    `source`.
    """
    try:
        return msgspec.convert(raw, kind)
    except msgspec.ValidationError as e:
        raise error(f"{source}: {fault(raw, kind, str(e), path)}") from None
    except RecursionError:
        raise error(
            f"{source}: {path} refers to itself or is nested too deeply: write it out"
        ) from None


def decode(
    data: bytes, kind: Any, source: str, error: type[GdntuneError], accepted: str = ""
) -> Any:
    """JSON `data` as a `kind`; raises `error`. accepted: said where it is no JSON at all."""
    try:
        return msgspec.json.decode(data, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        pass
    # What follows only serves the message: msgspec's own has neither the value nor the keys of a
    # mapping.
    try:
        raw = msgspec.json.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as e:
        raise error(f"{source}: not JSON: {e}{accepted and f'; expected {accepted}'}") from None
    convert(raw, kind, source, error)
    # Unreachable while msgspec's two ways of checking agree.
    raise error(f"{source}: not what was expected")


def refuse_newer(data: bytes, schema: str, source: str, error: type[GdntuneError]) -> None:
    """Raises `error` for a JSON object of another schema than `schema`, as `gdntune.table/1`."""
    name, _, version = schema.rpartition("/")
    # By the head alone, undecoded: a newer schema may be one that this version cannot decode.
    found = re.search(rb'"schema"\s*:\s*"' + name.encode() + rb'/(\d+)"', data[:_HEAD])
    if found is None or int(found[1]) <= int(version):
        return
    by = _writer(data)
    raise error(
        f"{source}: {name}/{found[1].decode()} was written by"
        f" {f'gdntune {by}' if by else 'a newer gdntune'}; gdntune {__version__} reads {name} up to"
        f" {version}: install that version or a later one (pip install -U gdntune)"
    )


def newer_writer(data: bytes) -> str:
    """What to do about a document that could not be read, where its head says that a newer gdntune
    wrote it; empty where it does not.
    """
    by = _writer(data)
    if _numbers(by) <= _numbers(__version__):
        return ""
    return (
        f"gdntune {by} wrote it, and this is gdntune {__version__}: install that version or a later"
        " one (pip install -U gdntune)"
    )


def _writer(data: bytes) -> str:
    """The version of gdntune that a JSON object names; of a merged table, both."""
    by = re.search(rb'"gdntune"\s*:\s*"([^"]*)"', data[:_HEAD])
    return by[1].decode(errors="replace") if by else ""


def _numbers(version: str) -> tuple[int, ...]:
    """Numbers by which versions are ordered; of several versions those of the latest."""
    each = (re.match(r"\d+(\.\d+)*", v.strip()) for v in version.split(","))
    # A merged table names several versions, with commas.
    return max((tuple(map(int, m[0].split("."))) for m in each if m), default=())


def refuse_odd_json(data: bytes, source: str, error: type[GdntuneError]) -> None:
    """Raises `error`, with the path in the document, for what JSON decoders disagree on: a key that
    stands twice in an object, NaN and Infinity. Other faults are left to `decode`.
    """
    twice: list[str] = []

    def paired(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) < len(pairs):
            keys = [key for key, _ in pairs]
            found[_MARK] = next(key for key in keys if keys.count(key) > 1)
            # Marked in the object itself, since the hook knows no path; `_where` finds it again.
            twice.append(found[_MARK])
        return found

    odd: list[str] = []

    def number(text: str) -> float:
        found = float(text)
        if not math.isfinite(found):
            odd.append(text)
        return found

    try:
        raw = json.loads(data, object_pairs_hook=paired, parse_float=number, parse_constant=number)
    except (ValueError, RecursionError):
        return
    # A table has tens of thousands of values: only where one is odd is it worth finding.
    if not twice and not odd:
        return
    if twice:
        path, key = next(_where(raw, lambda v: isinstance(v, dict) and _MARK in v))
        raise error(f"{source}: {path} has the key `{key[_MARK]}` twice: leave one of them")
    for path, value in _where(raw, lambda v: isinstance(v, float) and not math.isfinite(v)):
        raise error(f"{source}: {path} is {value}: expected a finite number")


def _where(value: Any, fits: Callable[[Any], bool], path: str = "$") -> Iterator[tuple[str, Any]]:
    """Each value that fits, with its path."""
    if fits(value):
        yield path, value
    elif isinstance(value, dict):
        for key, inner in value.items():
            yield from _where(inner, fits, path + _key_step(key))
    elif isinstance(value, list):
        for i, inner in enumerate(value):
            yield from _where(inner, fits, f"{path}[{i}]")


def _key_step(key: str) -> str:
    return f".{key}" if key.isidentifier() else f"[{key!r}]"


def fault(raw: Any, kind: Any, message: str, path: str = "$") -> str:
    """msgspec's `message` on `raw`, which is no `kind`, with what it leaves out."""
    found = re.fullmatch(r"(?s)(.*?)(?: - at (?:(`key`) in )?`\$(.*?)`)?", message)
    what, is_key, below = (
        (found.group(1), found.group(2), found.group(3) or "") if found else (message, None, "")
    )
    for step in re.findall(r"\.([^.\[\]]+)|\[([^\]]*)\]", below):
        name, index = step
        # msgspec's path ends at the tag itself, which no struct has as a field.
        if name and (tags := _tags(kind, name)):
            return f"{path}.{name} is {short(raw[name])}: expected {one_of(tags)}"
        # The path of a mapping's entry, which msgspec does not name: each is tried again.
        if index == "...":
            return _entry_fault(raw, _argument(kind, raw, -1), what, path)
        kind = _field_kind(kind, raw, name) if name else _argument(kind, raw, 0)
        raw = raw[name] if name else raw[int(index)]
        path += f".{name}" if name else f"[{index}]"
    if is_key or what == "Expected `str`":
        wrong = (
            # YAML makes 1: an integer and yes: a truth value, as keys too.
            next((key for key in raw if not isinstance(key, str)), raw)
            if isinstance(raw, dict)
            else raw
        )
        return f"{path} has the key {short(wrong)}: keys are text; put it in quotes"
    return _described(raw, kind, what, path)


def short(value: Any) -> str:
    """A value as a message shows it."""
    return _short.repr(value)


def near(name: str, names: Any) -> str:
    """` (did you mean X?)`, or nothing where no name is near."""
    close = difflib.get_close_matches(str(name), [str(n) for n in names], n=1)
    return f" (did you mean `{close[0]}`?)" if close else ""


def _described(raw: Any, kind: Any, what: str, path: str) -> str:
    members = list(_members(kind, raw))
    names = [f.encode_name for m in members if _is_struct(m) for f in msgspec.structs.fields(m)]
    if unknown := re.search(r"unknown field `(.*)`", what):
        return (
            f"{path} has the unknown key `{unknown[1]}`{near(unknown[1], names)}: expected"
            f" {one_of(names)}"
        )
    if missing := re.search(r"missing required field `(.*)`", what):
        return f"{path} lacks the key `{missing[1]}`: its keys are {listed(names)}"
    if "Invalid enum value" in what or any(get_origin(m) is Literal for m in members):
        accepted = [a for m in members if get_origin(m) is Literal for a in get_args(m)]
        return f"{path} is {short(raw)}{near(raw, accepted)}: expected {one_of(accepted)}"
    # The tag of a union of structs.
    if what.startswith("Invalid value"):
        accepted = [m.__struct_config__.tag for m in _members(kind, None) if _is_struct(m)]
        return f"{path} is {short(raw)}: expected {one_of(accepted)}"
    expected = re.sub(r", got `.*`$", "", what).replace("Expected ", "")
    expected = re.sub(
        r"`([^`]*)`", lambda m: " or ".join(_WORDS.get(w, w) for w in m[1].split(" | ")), expected
    )
    hint = (
        "; yes, no, on and off are true and false in YAML"
        if isinstance(raw, bool) and "true" not in expected
        else ""
    )
    return f"{path} is {short(raw)}: expected {expected}{hint}"


def _entry_fault(raw: dict[str, Any], kind: Any, what: str, path: str) -> str:
    for key, value in raw.items():
        try:
            msgspec.convert(value, kind)
        except msgspec.ValidationError as e:
            return fault(value, kind, str(e), path + _key_step(key))
    return f"{path}: {what}"


def _tags(kind: Any, field: str) -> list[Any]:
    """The values of a union's tag, where `field` is that."""
    members = [m for m in _members(kind, None) if _is_struct(m)]
    configs = [m.__struct_config__ for m in members]
    return [c.tag for c in configs if c.tag is not None and c.tag_field == field]


def _is_struct(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, msgspec.Struct)


def _members(kind: Any, raw: Any) -> Iterator[Any]:
    """The types that `kind` allows where `raw` stands: of tagged structs only the one that `raw`
    names.
    """
    if get_origin(kind) is Annotated:
        yield from _members(get_args(kind)[0], raw)
    elif get_origin(kind) is Union or type(kind).__name__ == "UnionType":
        for member in get_args(kind):
            yield from _members(member, raw)
    elif _is_struct(kind) and kind.__struct_config__.tag is not None and isinstance(raw, dict):
        if raw.get(kind.__struct_config__.tag_field) == kind.__struct_config__.tag:
            yield kind
    else:
        yield kind


def _field_kind(kind: Any, raw: Any, name: str) -> Any:
    for member in _members(kind, raw):
        if _is_struct(member):
            for field in msgspec.structs.fields(member):
                if field.encode_name == name:
                    return field.type
    return Any


def _argument(kind: Any, raw: Any, index: int) -> Any:
    wanted = (dict,) if isinstance(raw, dict) else (list, tuple)
    return next((get_args(m)[index] for m in _members(kind, raw) if get_origin(m) in wanted), Any)
