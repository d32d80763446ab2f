"""The step, compiled by the real compilers, and what they report about it."""

from .budget import BudgetExceeded as BudgetExceeded
from .budget import assert_budget as assert_budget
from .compare import CompiledDiff as CompiledDiff
from .compare import diff as diff
from .compilation import compile as compile
from .compilation import host_of as host_of
from .compilation import lowered_job as lowered_job
from .compilation import lowered_step as lowered_step
from .compilation import step_machine as step_machine
from .compilation import tokens_of as tokens_of
from .job import job_of as job_of
from .job import traced as traced
from .plan import Plan as Plan
from .plan import plan_of as plan_of
from .result import Compiled as Compiled
from .result import Part as Part
from .saved import load_compiled as load_compiled
from .toolchain import CompileError as CompileError
from .toolchain import cache_folder as cache_folder
from .toolchain import find_compiler as find_compiler
from .toolchain import read_entry as read_entry
from .toolchain import start_backends as start_backends
from .toolchain import watched_compilers as watched_compilers
from .toolchain import write_entry as write_entry
