"""The supervisor: it knows every worker, notices when one dies, freezes or stalls, and decides what happens then.

Import it as ``resilient_executor.supervisor``. The folder stands at the top level of the repository; the name
``supervisor`` itself belongs to supervisord, which can live in the same environment.
"""
