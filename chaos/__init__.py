"""The chaos kit: faults on purpose, experiments around them, and reports about what happened.

Import it as ``resilient_executor.chaos``. It uses the package's public API and Ray only, as any user could.

==============  =======================================================================================================
``faults``      faults as data; which victims fit
``targets``     finds an executor by namespace and name
``control``     carries faults out against it, and heals; ``hands`` signals processes on their nodes
``recorder``    writes the history; ``checker`` judges it; ``report`` shows it
``soak``        faults under a serving engine (``arenas``), then the verdict; ``holdings`` finds what is left behind
``cli``         ``resilient-chaos``
``actions``     with ``probes`` and ``controls``: for the Chaos Toolkit; ``experiments/`` are ready to run
==============  =======================================================================================================
"""
