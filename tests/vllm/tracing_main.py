"""An engine with vLLM's tracing on: three requests in one batch, a worker killed under them. Run by test_tracing.py."""

from __future__ import annotations

import json
import sys
from typing import Any

from engines import PROMPTS, core_of, dying, offline


def main(endpoint: str) -> None:
    from vllm import SamplingParams

    with offline(
        pipeline_parallel_size=2, otlp_traces_endpoint=f"{endpoint}/v1/traces", disable_log_stats=False
    ) as llm:
        engine: Any = llm.llm_engine
        headers = {f"request-{n}": {"traceparent": f"00-{n:032x}-{n:016x}-01"} for n in (0xB1, 0xB2, 0xB3)}
        params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
        for (request_id, header), prompt in zip(headers.items(), PROMPTS, strict=False):
            engine.add_request(request_id, prompt, params, trace_headers=header)
        with dying(llm, 5):
            while engine.has_unfinished_requests():
                engine.step()
        outcomes = [incident.outcome for incident in core_of(llm).incidents]
    print(json.dumps(outcomes))


if __name__ == "__main__":
    main(sys.argv[1])
