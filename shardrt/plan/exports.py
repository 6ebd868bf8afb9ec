"""The public names of `shardrt.plan`, which imports them when one is first used."""

from .machine.cost import Costs
from .machine.hardware import Sheet, load_sheet
from .program.factory import make_program
from .program.forecast_result import Forecast, GroupForecast, StageForecast
from .program.job import Job, PlanError, Program
from .program.presets import preset_factory
from .question.planning import Planner
from .question.splits import JobForecast, best_splits, splits
from .run.forecast import forecast

__all__ = [
    "Costs",
    "Forecast",
    "GroupForecast",
    "Job",
    "JobForecast",
    "PlanError",
    "Planner",
    "Program",
    "Sheet",
    "StageForecast",
    "best_splits",
    "forecast",
    "load_sheet",
    "make_program",
    "preset_factory",
    "splits",
]
