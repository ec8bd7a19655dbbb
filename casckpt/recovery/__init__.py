"""Recovery: from a dead run to a continuation that was checked.

* `RecoveryCoordinator`, `make_plan`: decide by a table, fence, restore, check, fall back; and the same on paper;
* `find_nonfinite`, `find_schedule_gaps`, `Reference`, `TrialSteps`: checks of a state that was just loaded;
* `load_into`: a snapshot into live objects with changes: migrated, in parts, with values kept or set;
* `compare_lines`, `continuation`: steps that were committed twice, compared bit by bit;
* `bisect_check`: the first step at which a check of your own fails;
* `open_generation`: fences every process that still believes to be the learner;
* `BeatFile`, `BeatFolder`, `BeatServer`, `BeatClient`: who is alive, in a shared folder or over HTTP;
* `Supervisor`, `HealthServer`, `last_failure`, `supervised_beats`: a command kept alive, and its side of it;
* `Drill`: faults injected into a training of your own, and whether each was survived as promised;
* `SampleGate`, `SampleHold`, `Frontier`: which samples and items a recovered learner trains on.

Sits on engine and store; whatever it changes, it changes through them.
"""

from casckpt.engine.beats import Beat, BeatFile, BeatFolder, Pulse, supervised_beats
from casckpt.recovery.beat_server import BeatClient, BeatServer
from casckpt.recovery.bisection import Bisection, bisect_check, command_check
from casckpt.recovery.checks import Reference, TrialSteps, find_nonfinite, find_schedule_gaps
from casckpt.recovery.coordinator import RecoveryCoordinator, RecoveryReport
from casckpt.recovery.decision import Action, FailureInfo, Policy, Rule, Situation, decide, survey
from casckpt.recovery.drill import Drill, DrillReport
from casckpt.recovery.health import HealthServer
from casckpt.recovery.loading import LoadReport, config_drift, load_into
from casckpt.recovery.migrations import Migrations, migration
from casckpt.recovery.plan import RecoveryPlan, make_plan
from casckpt.recovery.samples import Frontier, SampleGate, SampleHold, Version
from casckpt.recovery.steps import PlanStep
from casckpt.recovery.supervisor import Settings, Supervisor, command_probe, last_failure
from casckpt.store.generations import Generation, list_generations, open_generation, own_generation
from casckpt.store.lines import Divergence, LineComparison, compare_lines, continuation

__all__ = [
    "Action",
    "Beat",
    "BeatClient",
    "BeatFile",
    "BeatFolder",
    "BeatServer",
    "Bisection",
    "Divergence",
    "Drill",
    "DrillReport",
    "FailureInfo",
    "Frontier",
    "Generation",
    "HealthServer",
    "LineComparison",
    "LoadReport",
    "Migrations",
    "PlanStep",
    "Policy",
    "Pulse",
    "RecoveryCoordinator",
    "RecoveryPlan",
    "RecoveryReport",
    "Reference",
    "Rule",
    "SampleGate",
    "SampleHold",
    "Settings",
    "Situation",
    "Supervisor",
    "TrialSteps",
    "Version",
    "bisect_check",
    "command_check",
    "command_probe",
    "compare_lines",
    "config_drift",
    "continuation",
    "decide",
    "find_nonfinite",
    "find_schedule_gaps",
    "last_failure",
    "list_generations",
    "load_into",
    "make_plan",
    "migration",
    "open_generation",
    "own_generation",
    "supervised_beats",
    "survey",
]
