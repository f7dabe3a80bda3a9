"""Tools for agents, by the names that environments import: typed functions, schemas, MCP servers and their loop."""

from verl_atgrpo.play.messages import Reply, ToolCall
from verl_atgrpo.play.tool_use import ToolUse, use_tools
from verl_atgrpo.play.tools import Tool, ToolError, mcp_tools

__all__ = ["Reply", "Tool", "ToolCall", "ToolError", "ToolUse", "mcp_tools", "use_tools"]
