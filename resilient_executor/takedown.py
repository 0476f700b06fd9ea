"""The end of an executor: everything that it has started is stopped, in an order that cannot wait for ever."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from resilient_executor.config import ExecutorConfig
    from resilient_executor.lifecycle import Lifecycle
    from resilient_executor.overseer import Overseer
    from resilient_executor.recovery import Recovery
    from resilient_executor.supervisor.client import Supervision

logger = logging.getLogger(__name__)

#: What shutdown may take for healthy workers to put their things in order.
_FAREWELL_S: Final = 2.0


def take_down(
    config: ExecutorConfig, lifecycle: Lifecycle, overseer: Overseer, recovery: Recovery, supervision: Supervision
) -> None:
    """Stop the overseer, let healthy workers put their things in order, end all, and prove the processes gone."""
    current = lifecycle.current
    recovery.stopping.set()
    healthy = current is not None and current.served and not current.condemned
    if not healthy and current is not None and current.group is not None:
        # Whoever is in the middle of building it waits for its workers: that ends with them.
        supervision.fence(current.group.processes())
    overseer.stop(config.teardown_timeout_s)
    if current is not None and healthy:
        supervision.retire(current.epoch)
        if current.pipeline is not None:
            current.pipeline.condemn(None)
        # No teardown before they are gone: it would last as long as the step in their hands.
        if current.group is not None:
            current.group.shut_down(_FAREWELL_S)
    if (last := lifecycle.current) is not None:
        try:
            recovery.bury(last, None)
        except Exception as error:  # noqa: BLE001 - the rest must be taken down all the same
            logger.error("shutdown: %s", error)
    recovery.end()
    supervision.stop()
