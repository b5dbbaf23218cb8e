"""How every command takes its options: the fields of dataclasses are the options, their docstrings the help.

An option is spelt alike everywhere, with hyphens or underscores: field `max_length` is --max-length, field `lr` of
section `optim` is --optim.lr. `--help` shows examples and what is used most, `--help-all` everything.
"""

from __future__ import annotations

import argparse
import ast
import dataclasses
import inspect
import itertools
import os
import re
import textwrap
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args, get_origin, get_type_hints

from maelm_fast.config import from_dict
from maelm_fast.data.files import read_yaml
from maelm_fast.errors import UserError, did_you_mean, unknown

Settings = Mapping[str, Mapping[str, Any]]


def option(default: Any = dataclasses.MISSING, **settings: Any) -> Any:
    """A field with settings of argparse's add_argument, and of ours. positional: it is no option. aliases: more
    spellings. more: only --help-all shows it. literal: "~" in it is not the home directory."""
    return dataclasses.field(default=default, metadata=settings)


def parse(
    command: str,
    argv: Sequence[str],
    *classes: type,
    examples: str,
    main: Collection[str] = (),
    change: Settings | None = None,
    config_files: bool = False,
) -> Any:
    """The options of `maelm-fast command` as an instance of the class, or a tuple of instances of several.

    The first class's docstring describes the command, and --help shows its fields and those of `main`. change: settings
    (see `option`, and "default") by field, "optim.lr" for one in a section. config_files: --config reads options from
    YAML; later files and options override earlier ones. --help and --help-all print and exit; UserError in one line for
    whatever is wrong."""
    change = change or {}
    fields = dict(_fields(classes[0], change))
    for cls in classes[1:]:
        fields |= _fields(cls, change, section=str(inspect.getdoc(cls)).partition(".")[0])
    first = {name for name, field in _fields(classes[0], change) if not field.settings.get("more")}
    shown = {*first, *main}
    if "--help-all" not in argv:
        fields = {name: _brief(field, name in shown, name not in first) for name, field in fields.items()}
    parser = _parser(command, classes[0], examples, fields)
    if config_files:
        from jsonargparse import ActionConfigFile  # type: ignore[attr-defined]

        parser.add_argument("--config", action=ActionConfigFile, metavar="FILE", help="YAML with any of the options")
    if {"-h", "--help", "--help-all"} & {*argv}:
        print(parser.format_help().rstrip())
        raise SystemExit(0)
    argv = [_hyphens(word) for word in argv]
    for file in _config_files(argv) if config_files else ():
        read_yaml(Path(file).expanduser())
    try:
        values = parser.parse_args(argv).as_dict()
    except (argparse.ArgumentError, TypeError, ValueError, OSError) as error:
        raise _user_error(error, argv, fields, parser.prog) from None
    made = [from_dict(cls, {f.name: _value(f, values) for f in _given(cls)}) for cls in classes]
    return made[0] if len(made) == 1 else tuple(made)


Main = Callable[[list[str]], int]


def run_command(prog: str, commands: Mapping[str, str], find: Callable[[str], Main], argv: Sequence[str]) -> int:
    """Runs the command of a group, whose main function `find` gives and imports, or prints what commands there are."""
    if not argv or argv[0] in ("-h", "--help", "--help-all"):
        width = max(10, *(len(name) + 2 for name in commands))
        lines = [f"  {name:{width}}{text}" for name, text in commands.items()]
        print(f"usage: {prog} COMMAND ...\n\n" + "\n".join(lines) + f"\n\n'{prog} COMMAND --help' says more.")
        return 0
    if argv[0] not in commands:
        raise unknown("command", argv[0], commands)
    return find(argv[0])(list(argv[1:]))


class _Field(NamedTuple):
    hint: Any
    default: Any
    help: str
    settings: dict[str, Any]
    section: str


_OURS = ("positional", "aliases", "more", "literal")


def _fields(cls: type, change: Settings, prefix: str = "", section: str = "") -> Iterator[tuple[str, _Field]]:
    """The options of a dataclass by dotted name, those of the dataclasses in it included."""
    hints, docs = get_type_hints(cls), _docstrings(cls)
    for field in _given(cls):
        name, hint = prefix + field.name, hints[field.name]
        if isinstance(hint, type) and dataclasses.is_dataclass(hint):
            yield from _fields(hint, change, f"{name}.", name)
            continue
        settings = {**field.metadata, **change.get(name, {})}
        default = field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
        default = settings.pop("default", default)
        text = settings.pop("help", docs.get(field.name, ""))
        yield name, _Field(hint, default, text, settings, section)


def _given(cls: type) -> list[dataclasses.Field[Any]]:
    """The fields that are options: those that decide something."""
    return [field for field in dataclasses.fields(cls) if field.compare]


def _docstrings(cls: type) -> dict[str, str]:
    """The string below each field."""
    texts: dict[str, str] = {}
    (tree,) = ast.parse(textwrap.dedent(inspect.getsource(cls))).body
    assert isinstance(tree, ast.ClassDef)
    for pair in itertools.pairwise(tree.body):
        match pair:
            case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(text))):
                texts[name] = " ".join(text.split())
    return texts


def _brief(field: _Field, shown: bool, first_sentence: bool) -> _Field:
    """The field as --help has it: without its section, and with only the first sentence of its help, or hidden."""
    text = field.help.partition(". ")[0] if first_sentence else field.help
    return field._replace(help=text if shown else argparse.SUPPRESS, section="")


def _parser(command: str, first: type, examples: str, fields: Mapping[str, _Field]) -> Any:
    from jsonargparse import ArgumentParser

    prog, hidden = f"maelm-fast {command}", sum(field.help == argparse.SUPPRESS for field in fields.values())
    about = "\n".join(textwrap.fill(part, 80) for part in str(inspect.getdoc(first)).split("\n\n"))
    parser = ArgumentParser(
        prog=prog,
        formatter_class=_Formatter,
        usage=" ".join([prog, *filter(None, itertools.starmap(_in_usage, fields.items())), "[OPTION ...]"]),
        description=textwrap.indent(textwrap.dedent(examples).strip(), "  ") + f"\n\n{about}",
        epilog=f"{hidden} more: {prog} --help-all" if hidden else None,
        add_help=False,
        exit_on_error=False,
        allow_abbrev=False,
        print_config=None,
    )
    groups: dict[str, Any] = {"": parser}
    for name, field in fields.items():
        if field.section not in groups:
            groups[field.section] = parser.add_argument_group(field.section)
        _add(groups[field.section], name, field)
    return parser


class _Formatter(argparse.RawDescriptionHelpFormatter):
    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=26)

    def _format_action_invocation(self, action: argparse.Action) -> str:
        """Short spellings first, what they take once."""
        if not action.option_strings:
            return super()._format_action_invocation(action)
        takes = "" if action.nargs == 0 else f" {action.metavar}"
        return ", ".join(sorted(action.option_strings, key=len)) + takes + (" ..." if action.nargs == "+" else "")


def _in_usage(name: str, field: _Field) -> str | None:
    """How a positional or a required option stands in the usage line."""
    shown = field.settings.get("metavar") or _metavar(name, field.hint)
    shown += " ..." if get_origin(field.hint) is tuple and field.settings.get("positional") else ""
    if field.settings.get("positional"):
        return shown if field.default is dataclasses.MISSING else f"[{shown}]"
    return f"--{name.replace('_', '-')} {shown}" if field.default is dataclasses.MISSING else None


def _asked_for(name: str, field: _Field) -> str:
    return str(_in_usage(name, field)) if field.settings.get("positional") else _option(name)


def _add(group: Any, name: str, field: _Field) -> None:
    settings: dict[str, Any] = {"type": field.hint, "help": _help(field)}
    given = {key: value for key, value in field.settings.items() if key not in _OURS}
    positional, aliases = (field.settings.get(key) for key in ("positional", "aliases"))
    required, default = field.default is dataclasses.MISSING, field.default
    if not required:
        settings["default"] = default
    if get_origin(field.hint) is tuple and get_args(field.hint)[1:] == (...,):  # as many as are given, also one by one
        settings |= {"type": get_args(field.hint)[0], "nargs": "*" if positional and not required else "+"}
        settings |= {} if required else {"default": list(default)}
        settings |= {} if positional else {"action": "extend"}
    elif positional and not required:
        settings["nargs"] = "?"
    if field.hint is bool and "." not in name:
        settings = {"action": "store_true", "help": settings["help"]}
    else:
        settings["metavar"] = _metavar(name, field.hint)
    if positional:
        group.add_argument(name, **settings | given)
    else:
        group.add_argument(_option(name), *(aliases or ()), required=required, **settings | given)


def _option(name: str) -> str:
    return "--" + name.replace("_", "-")


def _metavar(name: str, hint: Any) -> str:
    hint = _present(hint)
    if get_origin(hint) is Literal or hint is bool:
        return "{" + ",".join(map(str, get_args(hint) or ("true", "false"))) + "}"
    if get_origin(hint) is tuple:
        hint = get_args(hint)[0]
    return {int: "N", float: "X", Path: "PATH"}.get(hint) or name.replace("_", ".").rpartition(".")[2].upper()


def _help(field: _Field) -> str:
    text, default = field.help, field.default
    told = "(default:" in text or default is dataclasses.MISSING or default is False or default in (None, (), [])
    if text == argparse.SUPPRESS or told:
        return text.replace("%", "%%") if told else text
    shown = f"[{','.join(map(str, default))}]" if isinstance(default, tuple | list) else str(default).lower()
    return f"{text.removesuffix('.')} (default: {shown})".strip().replace("%", "%%")


def _hyphens(word: str) -> str:
    name, equals, value = word.partition("=")
    return name.replace("_", "-") + equals + value if name.startswith("--") else word


def _value(field: dataclasses.Field[Any], values: Mapping[str, Any]) -> Any:
    return values[field.name] if field.metadata.get("literal") else _at_home(values[field.name])


def _at_home(value: Any) -> Any:
    """The value with "~/" at its start, or its parts', as the home directory."""
    if isinstance(value, dict):
        return {key: _at_home(part) for key, part in value.items()}
    if isinstance(value, list):
        return [_at_home(part) for part in value]
    if isinstance(value, str | Path) and str(value).startswith("~/"):
        return type(value)(os.path.expanduser(value))
    return value


_REQUIRED = "the following arguments are required: "
_UNKNOWN = re.compile(
    r"unrecognized arguments: (--[\w.-]+)|(?:[Kk]ey|Option) '([\w.]+)' is not (?:expected|accepted)|"
    r"Group '(\w+)' does not accept option '(\w+)'"
)


def _user_error(error: Exception, argv: Sequence[str], fields: Mapping[str, _Field], prog: str) -> UserError:
    """jsonargparse's error in plain words, with the nearest option for an unknown one. If it is about something that is
    not on the command line, the files of --config stand before it: jsonargparse names none."""
    text = " ".join(str(error).split())
    in_file = re.search("Problems parsing config|Unexpected config", text) is not None
    if found := _UNKNOWN.search(text):
        name = ".".join(part for part in found.groups() if part).removeprefix("--").replace("-", "_")
        text = f"unknown option '{_option(name)}'{did_you_mean(_option(name), [*map(_option, fields)])}"
    elif text.startswith(_REQUIRED):
        names = text.removeprefix(_REQUIRED).split(", ")
        text = _REQUIRED + ", ".join(_asked_for(n, fields[n]) for n in names)
    elif found := re.search(r'Parser key "([\w.]+)": .*(?:Got|Given) value: (.*)', text):
        name = found[1]
        text = f"{_option(name)} takes {_kind(fields[name].hint)}, not {found[2]}" if name in fields else text
    text = re.sub(r'Parser key "(\w+)":', r"--\1:", text)
    if found:
        given = {word.partition("=")[0] for word in argv}
        spelt = fields[name].settings.get("aliases", ()) if name in fields else ()
        in_file = given.isdisjoint((_option(name), *spelt))
    if in_file and (files := _config_files(argv)):
        text = f"{', '.join(files)}: {text}"
    return UserError(text if "--help" in text else f"{text} (see '{prog} --help')")


def _kind(hint: Any) -> str:
    """A type in words."""
    hint = _present(hint)
    if get_origin(hint) is Literal:
        return f"one of {', '.join(map(str, get_args(hint)))}"
    if get_origin(hint) is tuple:
        return f"[{','.join('X' for _ in get_args(hint))}]"
    return {int: "a whole number", float: "a number", bool: "true or false"}.get(hint, "text")


def _present(hint: Any) -> Any:
    """The type of a field, if it may also be None."""
    return next((part for part in get_args(hint) if type(None) in get_args(hint) and part is not type(None)), hint)


def _config_files(argv: Sequence[str]) -> list[str]:
    named = [value for word, value in itertools.pairwise(argv) if word == "--config"]
    return named + [word.removeprefix("--config=") for word in argv if word.startswith("--config=")]
