"""What every endpoint works with: the models, the settings, the keys and what is counted. No HTTP."""

from __future__ import annotations

import hashlib
import time
from typing import TYPE_CHECKING

from outrider.serve.errors import ApiError
from outrider.serve.intake import Intake, Pool
from outrider.serve.keys import Key, Keyring, Limiter, Refusal
from outrider.serve.model_table import ModelTable
from outrider.serve.settings import ServeSettings

if TYPE_CHECKING:
    from outrider.serve.call import Call
    from outrider.serve.model_service import ModelService


class Service:
    def __init__(self, table: ModelTable, settings: ServeSettings, keys: Keyring) -> None:
        self.table, self.settings, self.keys = table, settings, keys
        self.limiter = Limiter()
        self.intake = Intake()
        self.pool = Pool(settings.max_queued_requests, table.first.metrics)
        self.draining = False
        self.begun = time.time()
        self.others_seconds = 0.0  # of processor time that other programs used, when it was last asked for

    def count(self, key: Key) -> None:
        """Count a request against its key, before anything is done for it; or refuse it."""
        self._refuse(self.limiter.count(key), self.table.first)

    def admit(self, key: Key, tokens: int, model: ModelService) -> None:
        """Reserves `tokens` for a counted request, or refuses it."""
        self._refuse(self.limiter.admit(key, tokens), model)

    def _refuse(self, refusal: Refusal | None, model: ModelService) -> None:
        if refusal is not None:
            model.metrics.count("admission_rejections", reason="key_limit")
            status, after = (400, None) if refusal.final else (429, refusal.seconds)
            raise ApiError(status, refusal.reason, code="rate_limit_exceeded", after=after)


def keep_traffic(model: ModelService, key: Key, call: Call) -> None:
    """Hand over what a marked key was served, if the server keeps any of it."""
    if model.traffic is not None and key.keep_traffic:
        for answer in call.exact_answers():
            model.traffic.keep(key.name, *answer)


def owner_of(key: Key | None, salt: str | None) -> str:
    """Whose cache entries a request may use: its key's, and of those only the ones with the same salt."""
    owner = key.owner if key else ""
    return f"{owner}:{hashlib.sha256(salt.encode()).hexdigest()}" if salt else owner
