"""Tools for agents, by the names that environments import: typed functions, schemas, MCP servers and their loop."""

from verl_atgrpo.play.messages import MessageError, Reply, ToolCall
from verl_atgrpo.play.tool_use import ToolUse, observe, use_tools
from verl_atgrpo.play.tools import Tool, ToolError, ToolSource, mcp_tools, tools_of

__all__ = [
    "MessageError",
    "Reply",
    "Tool",
    "ToolCall",
    "ToolError",
    "ToolSource",
    "ToolUse",
    "mcp_tools",
    "observe",
    "tools_of",
    "use_tools",
]
