"""The chaos kit: faults on purpose, experiments around them, and reports about what happened.

Import it as ``resilient_executor.chaos``. It uses the package's public API and Ray only, as any user could.
"""
