"""Devices that cannot hold their clocks: cells that were throttled are counted, and end a run."""

from collections import Counter
from collections.abc import Sequence

import msgspec

from gdntune.errors import MeasurementError
from gdntune.results.records import Cell, Record

# So many throttled cells of a device in a row, each twice and after a wait, are no accident.
THROTTLED_IN_A_ROW = 3
# How the reason of a cell begins that has no times for it.
THROTTLED = "throttled by "


class Throttling:
    """Counts the throttled cells that each device had in a row; a device is named where several
    share the cells.
    """

    def __init__(self) -> None:
        self._in_a_row: Counter[str | msgspec.UnsetType] = Counter()

    def see(self, records: Sequence[Record]) -> None:
        """Takes note of a cell's records."""
        for cell in (r for r in records if isinstance(r, Cell)):
            self._in_a_row[cell.timed_on] = (
                self._in_a_row[cell.timed_on] + 1 if was_throttled(cell) else 0
            )

    def fit(self, device: str | msgspec.UnsetType = msgspec.UNSET) -> bool:
        """Whether a device holds its clocks, as far as its last cells say."""
        return self._in_a_row[device] < THROTTLED_IN_A_ROW


def was_throttled(cell: Cell) -> bool:
    """Whether a cell has no times because its device was throttled."""
    return cell.status != "ok" and cell.reason.startswith(THROTTLED)


def cannot_hold_its_clocks(records: Sequence[Record]) -> MeasurementError:
    """What ends a run whose last cell is the third in a row that was throttled."""
    last = next(r.reason for r in reversed(records) if isinstance(r, Cell) and was_throttled(r))
    return MeasurementError(
        f"the last {THROTTLED_IN_A_ROW} cells were {last}, and so when timed again: at such clocks"
        " another variant can be the fastest, so the run ends here. What is journalled stays, and"
        " `gdntune report` of its folder shows it. See to the device's cooling and power, or take"
        " another of its model, and give the same command again: it goes on with the cells that"
        " are left, these last"
    )
