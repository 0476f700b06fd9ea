"""Which of the driver's environment variables workers get. Pure: it reads and writes only what it is given.

The selection is made once, when the executor starts, and the resulting dict is handed to every worker of every epoch:
the tenth replacement gets exactly what the first worker got, whatever has happened to ``os.environ`` since.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from resilient_executor.errors import ConfigError

if TYPE_CHECKING:
    from resilient_executor.config import ExecutorConfig


@dataclass(frozen=True)
class EnvironmentRule:
    """Selects variables. Values never appear in its ``repr``: they may be secrets.

    A variable of the driver's environment is carried if its name is in ``names`` or begins with one of ``prefixes``,
    unless it is in ``exclude``. ``extra`` is what the user asked for by name and value, so it wins over the driver's
    value and over ``exclude``.

    Attributes:
        prefixes: beginnings of names to carry.
        names: whole names to carry.
        extra: variables to set, with their values.
        exclude: whole names never to carry.
    """

    prefixes: tuple[str, ...] = ()
    names: tuple[str, ...] = ()
    extra: Mapping[str, str] = field(default_factory=dict, repr=False, hash=False)
    exclude: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        """Check now what the operating system would otherwise refuse in every worker.

        Raises:
            ConfigError: a name or value in ``extra`` that no environment can hold; an empty prefix, which would carry
                the driver's whole environment.
        """
        if "" in self.prefixes:
            raise ConfigError("env_prefixes must not contain an empty prefix: it would carry every variable")
        for name, value in self.extra.items():
            if not isinstance(name, str) or not isinstance(value, str):
                raise ConfigError(f"env_extra must map names to texts; {name!r} does not")
            if not name or "=" in name or "\0" in name or "\0" in value:
                raise ConfigError(f"env_extra holds {name!r}, which cannot be an environment variable")
        object.__setattr__(self, "extra", dict(self.extra))

    @classmethod
    def from_config(cls, config: ExecutorConfig) -> EnvironmentRule:
        """Take the rule from the ``env_*`` settings.

        Raises:
            ConfigError: see :class:`EnvironmentRule`.
        """
        return cls(
            prefixes=tuple(config.env_prefixes),
            names=tuple(config.env_names),
            extra=config.env_extra,
            exclude=tuple(config.env_exclude),
        )

    def select(self, environ: Mapping[str, str]) -> dict[str, str]:
        """Return the variables that workers get, sorted by name. Selecting from the result again changes nothing."""
        excluded, named = frozenset(self.exclude), frozenset(self.names)
        selected = {
            name: value
            for name, value in environ.items()
            if name not in excluded and (name in named or name.startswith(self.prefixes))
        }
        return dict(sorted({**selected, **self.extra}.items()))


def apply(values: Mapping[str, str], environ: MutableMapping[str, str] | None = None) -> None:
    """Set ``values`` in a worker's environment, over what is there; the rest of it stays.

    Args:
        values: the result of :meth:`EnvironmentRule.select` in the driver.
        environ: where to set them; None is this process's own environment.
    """
    (os.environ if environ is None else environ).update(values)
