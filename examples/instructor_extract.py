"""instructor against a local server: a class filled from a text, through a tool call and through a JSON schema.

Run: outrider serve, and in another terminal: pip install instructor && python examples/instructor_extract.py
OPENAI_BASE_URL and OPENAI_API_KEY say where else to go.
"""

import os
from typing import Literal

import instructor
from openai import OpenAI
from pydantic import BaseModel

URL = os.environ.get("OPENAI_BASE_URL", "http://127.0.0.1:8000/v1")
KEY = os.environ.get("OPENAI_API_KEY", "none")
MODEL = os.environ.get("OUTRIDER_MODEL", "smollm2-135m")


class Review(BaseModel, extra="forbid"):
    """What a review says."""

    mood: Literal["good", "bad", "mixed"]
    recommended: bool


def main() -> None:
    messages = [{"role": "user", "content": "'A fine film.' What does this review say?"}]
    for mode in (instructor.Mode.TOOLS, instructor.Mode.JSON_SCHEMA):
        client = instructor.from_openai(OpenAI(base_url=URL, api_key=KEY), mode=mode)
        review = client.create(model=MODEL, response_model=Review, messages=messages, seed=7, max_retries=0)
        print(f"{mode.value}: {review!r}")


if __name__ == "__main__":
    main()
