"""Processes of ranks that tests share."""

from __future__ import annotations

from typing import Any

from flashmoe.launch import RankPool


class RenewedPool(RankPool):
    """One whose processes are others once any has ended: a test that had one killed is not to fail all that follow."""

    def call(self, *args: Any, **options: Any) -> list[Any]:
        if any(worker.ending() is not None for worker in self._workers):
            self.close()
            super().__init__(self.ranks)
        return super().call(*args, **options)
