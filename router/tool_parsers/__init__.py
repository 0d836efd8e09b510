"""Finds tool calls in the text of answers, in the forms that models write them, while the text arrives.

A parser is a state machine for one answer. It knows neither tokens nor HTTP. Other packages add parsers by subclassing
`ToolParser` and naming the class as an entry point in the group `baton.tool_parsers`.
"""

from router.tool_parsers.base import ToolParser, Tools
from router.tool_parsers.call_form import CallForm
from router.tool_parsers.call_list import CallListParser
from router.tool_parsers.custom_calls import CustomCalls
from router.tool_parsers.pieces import CallArguments, CallStart, Content, Part, Piece, Thought, merge
from router.tool_parsers.registry import TOOL_PARSERS, find_tool_parser

__all__ = [
    "CallArguments",
    "CallForm",
    "CallListParser",
    "CallStart",
    "Content",
    "CustomCalls",
    "Part",
    "Piece",
    "TOOL_PARSERS",
    "Thought",
    "ToolParser",
    "Tools",
    "find_tool_parser",
    "merge",
]
