"""What encryption costs: `python -m bench.encryption`. CPU of a job's documents, in microseconds."""

from __future__ import annotations

import json
import timeit

from breakwater.kernel.security.encryption import OFF, Cipher, new_key

JOB = {"agent": "writer", "job_id": "j1", "messages": [{"role": "user", "content": "word " * 400}]}
RESULT = {"execution_id": "j1", "agent": "writer", "output": "word " * 200, "attempts": [], "metadata": {}}
RECORD = {**RESULT, "messages": JOB["messages"]}
ROUNDS = 2_000


def microseconds(cipher: Cipher) -> float:
    """Of a job that is encrypted and decrypted once, its result likewise, and its record encrypted."""
    both, record = [json.dumps(one).encode() for one in (JOB, RESULT)], json.dumps(RECORD).encode()

    def job() -> None:
        for document in both:
            cipher.decrypt_document(cipher.encrypt_document(document))
        cipher.encrypt_document(record)

    return min(timeit.repeat(job, number=ROUNDS, repeat=5)) / ROUNDS * 1e6


if __name__ == "__main__":
    print(f"off {microseconds(OFF):.1f} µs a job, on {microseconds(Cipher([new_key()])):.1f} µs a job")
