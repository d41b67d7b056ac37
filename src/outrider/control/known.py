"""What every plan goes by."""

from __future__ import annotations

from typing import NamedTuple

from outrider.control.acceptance import AcceptanceRates
from outrider.control.costs import CostModel
from outrider.control.fairness import Fairness
from outrider.control.guards import Guards
from outrider.control.lengths import AnswerLengths


class Known(NamedTuple):
    guards: Guards
    costs: CostModel
    rates: AcceptanceRates
    fairness: Fairness
    lengths: AnswerLengths
