"""How dims flow through a traced program."""

from .dataflow import Flow as Flow
from .dataflow import Group as Group
from .dataflow import follow as follow
from .tracing import Method as Method
from .tracing import call_arguments as call_arguments
from .tracing import method_of as method_of
from .tracing import trace_flow as trace_flow
