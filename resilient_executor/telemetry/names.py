"""Every span, attribute and metric that this package emits. ``docs/observability.md`` is held against these tables.

Where OpenTelemetry has a convention (``rpc.*``, ``error.type``, ``process.pid``), it is followed; the rest is below
``resilient_executor.``. Durations are seconds, counts are UCUM annotations. Nothing here holds a prompt, an output, a
token id, an environment value or a path.
"""

from __future__ import annotations

from typing import Final, NamedTuple

_P: Final = "resilient_executor."

# -- attributes -------------------------------------------------------------------------------------------------------

EXECUTOR: Final = _P + "name"
EPOCH: Final = _P + "epoch"
STEP: Final = _P + "step.id"
TOKENS: Final = _P + "step.tokens"
REQUESTS: Final = _P + "step.requests"
LINKS_DROPPED: Final = _P + "step.links_dropped"
STEPS: Final = _P + "request.steps"
QUEUED: Final = _P + "step.queued"
OUTCOME: Final = _P + "outcome"
RANK: Final = _P + "rank"
STAGE: Final = _P + "stage"
WAIT: Final = _P + "rank.wait"
COMPUTE: Final = _P + "rank.compute"
HAND_OVER: Final = _P + "rank.hand_over"
NODE: Final = _P + "node.id"
CALL: Final = _P + "rpc.id"
POLICY: Final = _P + "rpc.policy"
ATTEMPTS: Final = _P + "attempts"
PHASE: Final = _P + "phase"
INCIDENT: Final = _P + "incident"
CAUSE: Final = _P + "cause"
CAUSE_SIGNAL: Final = _P + "cause.signal"
CAUSE_EXIT_CODE: Final = _P + "cause.exit_code"
CAUSE_DOING: Final = _P + "cause.doing"
SOURCE: Final = _P + "evidence.source"
LINK: Final = _P + "link"
STATE: Final = _P + "state"
SIGNAL: Final = _P + "signal"
PID: Final = "process.pid"
ERROR: Final = "error.type"
RPC_SYSTEM: Final = "rpc.system.name"
RPC_METHOD: Final = "rpc.method"

ATTRIBUTES: Final = {
    EXECUTOR: "the executor's name, a setting",
    EPOCH: "generation of workers",
    STEP: "number of the step over the executor's life",
    TOKENS: "tokens that the step runs",
    REQUESTS: "requests in the step's batch",
    LINKS_DROPPED: "requests that have a span of their own and got no link, because a span holds 128 links",
    STEPS: "sampled steps that served the request; the first 126 of them are linked",
    QUEUED: "seconds from the call until the graph took the step",
    OUTCOME: "`ok`, `raised`, `lost` (its epoch died) or `not_sent` (it was planned for other workers); for a rank "
    "also `killed` (it was the first cause), `fenced` (ended by the rebuild) or `no_reply`",
    RANK: "rank of the worker",
    STAGE: "pipeline stage of the worker",
    WAIT: "seconds for which the rank had nothing to do before this step's input came",
    COMPUTE: "seconds in the engine's worker",
    HAND_OVER: "seconds from the result until the next stage, or the driver, had it",
    NODE: "Ray's id of the node",
    CALL: "number of the collective RPC over the process's life",
    POLICY: "`once`, `read` or `journal`",
    ATTEMPTS: "how often it was tried",
    PHASE: "phase of a start, rebuild or shutdown",
    INCIDENT: "number of the incident over the executor's life",
    CAUSE: "kind of the first cause, for instance `process_exit`",
    CAUSE_SIGNAL: "signal that ended the process, for instance `SIGKILL`",
    CAUSE_EXIT_CODE: "exit code of the process",
    CAUSE_DOING: "what the rank was doing: `step 17`, the name of a call, a phase, `idle`",
    SOURCE: "who saw it: `supervisor`, `graph`, `rpc`, `health check`, `settle`, `rebuild`",
    LINK: "why there is a link: `request`, `incident`, `step`",
    STATE: "`STARTING`, `HEALTHY`, `SUSPECT`, `RECOVERING`, `FAILED` or `STOPPED`",
    SIGNAL: "`trace`: a span; `work`: something that no span could be made of",
    PID: "process id of the worker on its node",
    ERROR: "class of the exception, signal, or kind of the cause; only on failure",
    RPC_SYSTEM: "`ray`",
    RPC_METHOD: "`executor.Worker/` and the name of the method; of a callable, its own name",
}

# -- spans ------------------------------------------------------------------------------------------------------------

#: Span names are short: trees in a backend have narrow columns, and the scope says whose they are.
_N: Final = "executor."
STEP_SPAN: Final = _N + "step"
RANK_PREFIX: Final = _N + "step.rank "
RANK_SPAN: Final = RANK_PREFIX + "*"
REQUEST_SPAN: Final = _N + "request"
RPC_PREFIX: Final = _N + "Worker/"
RPC_SPAN: Final = RPC_PREFIX + "*"
ATTEMPT_SPAN: Final = _N + "rpc.attempt"
START_SPAN: Final = _N + "start"
SHUTDOWN_SPAN: Final = _N + "shutdown"
INCIDENT_SPAN: Final = _N + "incident"
DETECTION_SPAN: Final = _N + "incident.detection"
SUSPECT_SPAN: Final = _N + "incident.suspect"
READMISSION_SPAN: Final = _N + "incident.readmission"
FIRST_STEP_SPAN: Final = _N + "incident.first_step"
PHASE_PREFIX: Final = _N + "phase."
PHASE_SPAN: Final = PHASE_PREFIX + "*"
WORKER_PREFIX: Final = _N + "worker."
WORKER_SPAN: Final = WORKER_PREFIX + "*"
EVIDENCE_EVENT: Final = _P + "evidence"

_CAUSES: Final = (CAUSE, CAUSE_SIGNAL, CAUSE_EXIT_CODE, CAUSE_DOING, RANK, PID, NODE)


class SpanRow(NamedTuple):
    """One kind of span: where it hangs, what it covers, which attributes it may have beside EXECUTOR and ERROR."""

    parent: str
    meaning: str
    attributes: tuple[str, ...]


SPANS: Final = {
    STEP_SPAN: SpanRow(
        "the caller's span, or none",
        "one step, from the engine's call to its result",
        (EPOCH, STEP, TOKENS, REQUESTS, LINKS_DROPPED, QUEUED, OUTCOME),
    ),
    RANK_SPAN: SpanRow(
        STEP_SPAN,
        "one rank's part of it, from its input to the hand-over; of a rank that gave no answer, what is known of it",
        (EPOCH, STEP, RANK, STAGE, WAIT, COMPUTE, HAND_OVER, OUTCOME, PID, NODE),
    ),
    REQUEST_SPAN: SpanRow(
        "the request's own span, from its `trace_headers`",
        "the sampled steps that served one request, with links to them",
        (STEPS,),
    ),
    RPC_SPAN: SpanRow(
        "the caller's span or none; for the rank, the call's span; in a rebuild, the phase `replay`",
        "one collective RPC (kind client), and in it one rank's part (kind server)",
        (EPOCH, RPC_SYSTEM, RPC_METHOD, CALL, POLICY, ATTEMPTS, RANK, OUTCOME, PID, NODE),
    ),
    ATTEMPT_SPAN: SpanRow(RPC_SPAN, "an attempt that was lost with its epoch and repeated", (EPOCH, RPC_METHOD, CALL)),
    START_SPAN: SpanRow("the caller's span, or none", "the executor's start", (EPOCH,)),
    SHUTDOWN_SPAN: SpanRow("the caller's span, or none", "the executor's end", (EPOCH,)),
    INCIDENT_SPAN: SpanRow(
        "none",
        "one incident, from the first sign to the first good step; the evidence is in its events",
        (EPOCH, INCIDENT, OUTCOME, ATTEMPTS, *_CAUSES),
    ),
    SUSPECT_SPAN: SpanRow(INCIDENT_SPAN, "something was wrong, and being looked into", (EPOCH,)),
    DETECTION_SPAN: SpanRow(INCIDENT_SPAN, "from the first sign to the begin of the rebuild", (EPOCH,)),
    PHASE_SPAN: SpanRow(
        f"{INCIDENT_SPAN}, {START_SPAN} or {SHUTDOWN_SPAN}; none where the graph is built at the first step",
        "one phase: fence, tear_down, place, spawn, rank, initialise, load, replay, compile, warm_up",
        (EPOCH, PHASE),
    ),
    WORKER_SPAN: SpanRow(
        PHASE_SPAN,
        "one rank's part of a phase: init_worker, init_device, load_model, prepare_graph",
        (EPOCH, RANK, PID, NODE, OUTCOME),
    ),
    READMISSION_SPAN: SpanRow(INCIDENT_SPAN, "from the last phase until steps are taken again", (EPOCH,)),
    FIRST_STEP_SPAN: SpanRow(INCIDENT_SPAN, "from the readmission to the first good step", (EPOCH, STEP)),
}

# -- metrics ----------------------------------------------------------------------------------------------------------


class MetricRow(NamedTuple):
    """One instrument. Names carry no unit and no ``_total``: exporters add what their backend wants."""

    kind: str
    unit: str
    meaning: str
    attributes: tuple[str, ...]


STATE_METRIC: Final = _P + "state"
EPOCH_METRIC: Final = _P + "epoch"
HEARTBEAT: Final = _P + "worker.heartbeat.duration"
SUSPICION: Final = _P + "worker.suspicion"
SILENCE: Final = _P + "worker.heartbeat.silence"
STEP_DURATION: Final = _P + "step.duration"
STEP_QUEUE: Final = _P + "step.queue.duration"
RANK_COMPUTE: Final = _P + "worker.step.duration"
RANK_WAIT: Final = _P + "worker.step.wait.duration"
RANK_HAND_OVER: Final = _P + "worker.step.hand_over.duration"
LOST_STEPS: Final = _P + "step.lost"
RESTARTS: Final = _P + "restarts"
OUTAGE: Final = _P + "outage.duration"
PHASE_DURATION: Final = _P + "phase.duration"
RPC_DURATION: Final = "rpc.client.call.duration"
DROPPED: Final = _P + "telemetry.dropped"

METRICS: Final = {
    STATE_METRIC: MetricRow("gauge", "{state}", "1 for the state that the executor is in, 0 for the others", (STATE,)),
    EPOCH_METRIC: MetricRow("gauge", "{epoch}", "the newest generation of workers", ()),
    HEARTBEAT: MetricRow("histogram", "s", "round trip of a heartbeat", (RANK,)),
    SILENCE: MetricRow("gauge", "s", "how long a worker has been silent", (RANK,)),
    SUSPICION: MetricRow("gauge", "{phi}", "how unlikely it is that a silent worker lives (phi accrual)", (RANK,)),
    STEP_DURATION: MetricRow("histogram", "s", "a step, from the engine's call to its result", (OUTCOME,)),
    STEP_QUEUE: MetricRow("histogram", "s", "from the call until the graph took the step", ()),
    RANK_COMPUTE: MetricRow("histogram", "s", "a step in the engine's worker", (RANK, STAGE)),
    RANK_WAIT: MetricRow("histogram", "s", "a rank had nothing to do before its input came", (RANK, STAGE)),
    RANK_HAND_OVER: MetricRow("histogram", "s", "a result, until the next stage or the driver had it", (RANK, STAGE)),
    LOST_STEPS: MetricRow("counter", "{step}", "steps that were lost with their epoch", (CAUSE,)),
    RESTARTS: MetricRow("counter", "{restart}", "incidents, by cause and by how they ended", (CAUSE, OUTCOME)),
    OUTAGE: MetricRow("histogram", "s", "from the first sign until steps are taken again", (CAUSE, OUTCOME)),
    PHASE_DURATION: MetricRow("histogram", "s", "one phase of a start, rebuild or shutdown", (PHASE, ERROR)),
    RPC_DURATION: MetricRow("histogram", "s", "one collective RPC", (RPC_SYSTEM, RPC_METHOD, ERROR)),
    DROPPED: MetricRow(
        "counter", "{item}", "what was dropped because a queue was full or a backend did not take it", (SIGNAL,)
    ),
}

#: Explicit bounds where the SDK's, made for milliseconds, would put everything into one bucket. Seconds.
SECONDS_SHORT: Final = (0.0001, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 60)
SECONDS_LONG: Final = (0.01, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 60, 120, 300, 900, 3600)


def kind_of_span(name: str) -> str:
    """The row of :data:`SPANS` that a span's name belongs to."""
    for row in (RANK_SPAN, RPC_SPAN, PHASE_SPAN, WORKER_SPAN):
        if name.startswith(row.removesuffix("*")):
            return row
    return name
