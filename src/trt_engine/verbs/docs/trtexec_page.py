"""`docs reference/trtexec`: every option of trtexec and what it is here, written from the table that commands read."""

from __future__ import annotations

from trt_engine.command_line.trtexec_table import (
    OPTIONS,
    BackendSetting,
    FileArgument,
    IgnoredOption,
    ProfileShapes,
    RejectedOption,
    RenamedOption,
    SameOption,
    Translation,
    TrtexecOption,
)

VERBS = ("build", "bench", "profile")
ELSEWHERE = "; leave it out, or use trtexec itself and read its log with `trt-engine bench --parse-log FILE`"
"""The end of many hints, which the page has once."""


def meaning_text(option: TrtexecOption, meaning: Translation) -> str:
    """What a verb does with the option, in one cell."""
    match meaning:
        case SameOption():
            return "taken"
        case FileArgument():
            return "the file is the argument: `trt-engine build MODEL`, `trt-engine bench ENGINE`"
        case ProfileShapes():
            return "`--profile`, of the three together"
        case RenamedOption(flag, _, value):
            shown = value or ("VALUE" if option.takes_value else "")
            return f"`{flag} {shown}`".replace(" `", "`")
        case BackendSetting(name, value, _, _, also):
            return f"`-O {name}={value or 'VALUE'}`" + (f", `-O {also}`" if also else "")
        case IgnoredOption(why):
            return f"left out: {why}"
        case RejectedOption(hint):
            return f"refused: {hint}"


def outcome(option: TrtexecOption) -> str:
    """The last cell: what each verb does with the option; of an option that only measures, `build` is left out."""
    verbs = VERBS[1:] if option.measuring_only else VERBS
    groups: dict[str, list[str]] = {}
    for verb in verbs:
        text = meaning_text(option, option.for_verb(verb)).removesuffix(ELSEWHERE)
        groups.setdefault(text, []).append(f"`{verb}`")
    everywhere = len(groups) == 1 and not option.measuring_only
    return "; ".join(text if everywhere else f"{', '.join(named)}: {text}" for text, named in groups.items())


def table() -> str:
    """The table in Markdown; options with the same versions and outcome share a row."""
    rows: dict[tuple[str, str], list[str]] = {}
    for option in OPTIONS.values():
        name = f"{option.spelling}=VALUE" if option.takes_value else option.spelling
        rows.setdefault((option.versions, outcome(option)), []).append(f"`{name}`")
    lines = ["| options of trtexec | TensorRT | here |", "|---|---|---|"]
    for (versions, told), names in rows.items():
        lines.append(f"| {', '.join(names)} | {versions.replace(' to ', '–')} | {told.replace('|', chr(92) + '|')} |")
    return "\n".join(lines)


def trtexec_page() -> str:
    """The page in Markdown."""
    return f"# Trtexec options\n\nHow they are read: [trtexec](../trtexec.md#every-option).\n\n{table()}\n"
