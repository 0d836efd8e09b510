"""`python -m tools.flags_page`: write docs/flags.md, from the settings of the commands."""

from __future__ import annotations

from pathlib import Path

from baton.settings import Settings, flag_name, help_text, metavar
from baton.vllm_flags import VLLM_FLAGS
from decode_node.settings import DecodeSettings
from deploy.settings import OwnSettings, UpSettings
from prefill_node.settings import PrefillSettings
from router.settings import RouterSettings
from tools.api_reference.tables import code, table

PATH = Path(__file__).resolve().parent.parent / "docs" / "flags.md"
_HEAD = """# Flags

All flags of the commands that serve, made from their settings by `python -m tools.flags_page`. Each is also an
environment variable (`--max-num-seqs 8` is `BATON_MAX_NUM_SEQS=8`) and a key in the YAML file of `--config`
(`max-num-seqs: 8`); a flag wins over the environment, and that over the file. Those without a value also have a `--no-`
form. Several values (`N,...`) may follow a flag with spaces between them, too, as with vLLM. The README has a table of
the most important flags. `baton bench`, `doctor`, `top` and `tune` are explained on pages of their own, and in their
`--help`. `baton completion bash` (or `zsh`, `fish`) prints a script that completes subcommands and flags:
`source <(baton completion bash)`. What vLLM has, too, is named as there, except
[these flags](#flags-of-vllm).
"""

_FOR_VLLM = """
## Flags of vLLM

`vllm serve MODEL` is `baton up --model MODEL` on one machine, and otherwise a command for each process (see the
README). These flags of it have another name here, or none; a command that is given one says so:

"""


def rows(settings: type[Settings]) -> list[tuple[str, str, str]]:
    fields = sorted(settings.model_fields.items())
    return [
        (
            code(flag_name(name)),
            "" if field.annotation in (bool, bool | None) else code(metavar(field.annotation)),
            help_text(field),
        )
        for name, field in fields
    ]


def render() -> str:
    nodes, decode = rows(PrefillSettings), rows(DecodeSettings)
    assert nodes == decode, "nodes of either role have the same flags"
    passed_on = set(nodes) | set(rows(RouterSettings))
    taken = rows(UpSettings)
    own = [row for row in taken if row in rows(OwnSettings) or row not in passed_on]
    flags = {flag for flag, _, _ in taken}
    refused = sorted({flag for flag, _, _ in passed_on} - flags)
    sections = {
        "Nodes": ("`baton-prefill` and `baton-decode`.", nodes),
        "Router": ("`baton-router`.", rows(RouterSettings)),
        "A cluster on one machine": (
            "What `baton-up` decides itself. Others go to the nodes or the router as they are, except these, which it "
            f"does not take: {', '.join(refused)}.",
            own,
        ),
    }
    made = (
        f"\n## {title}\n\n{text}\n\n{table(('flag', 'value', 'what it is'), found)}"
        for title, (text, found) in sections.items()
    )
    return _HEAD + "".join(made) + _FOR_VLLM + table(("flag of `vllm serve`", "here"), _vllm_rows())


def _vllm_rows() -> list[tuple[str, str]]:
    return [(code(flag_name(name)), text) for name, text in VLLM_FLAGS.items()]


def main() -> None:
    PATH.write_text(render())


if __name__ == "__main__":
    main()
