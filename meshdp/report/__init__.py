"""Every byte that a compiled step moves, holds and computes with."""

from ._assert import assert_collectives as assert_collectives
from ._assert import assert_golden as assert_golden
from ._devices import Device as Device
from ._diff import diff as diff
from ._hlo import Collective as Collective
from ._hlo import by_axis as by_axis
from ._hlo import collectives as collectives
from ._hlo import table as table
from ._report import Report as Report
from ._report import report as report
from ._report import report_compiled as report_compiled
