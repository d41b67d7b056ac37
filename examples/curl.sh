#!/bin/sh
# The API with nothing but curl. Run: outrider serve, and in another terminal: sh examples/curl.sh [URL]
# A server with keys wants OPENAI_API_KEY.
set -eu

URL="${1:-http://127.0.0.1:8000}"

# post PATH BODY: send JSON; -N shows streams as they come.
post() {
    curl --fail-with-body -sSN "$URL$1" -H "Authorization: Bearer ${OPENAI_API_KEY:-none}" \
        -H "Content-Type: application/json" -d "$2"
    echo
}

echo "# Is it there, and what does it serve?"
curl --fail-with-body -sS "$URL/health"
echo
curl --fail-with-body -sS "$URL/v1/models" -H "Authorization: Bearer ${OPENAI_API_KEY:-none}"
echo

echo "# A conversation"
post /v1/chat/completions '{
  "messages": [{"role": "user", "content": "What is the capital of France?"}],
  "temperature": 0, "max_tokens": 24
}'

echo "# The same as a stream, with usage at its end"
post /v1/chat/completions '{
  "messages": [{"role": "user", "content": "What is the capital of France?"}],
  "temperature": 0, "max_tokens": 24, "stream": true, "stream_options": {"include_usage": true}
}'

echo "# One of three answers and no other"
post /v1/chat/completions '{
  "messages": [{"role": "user", "content": "Is the sky blue?"}],
  "structured_outputs": {"choice": ["yes", "no", "perhaps"]}
}'

echo "# How the guessing went, token by token"
post /v1/completions '{
  "prompt": "one two three one two three one two three", "max_tokens": 24, "temperature": 0,
  "speculative_decoding": {"drafter": "lookup", "depth": 4, "stats": true}
}'

echo "# A prediction of the answer: what came true of it is in usage"
post /v1/chat/completions '{
  "messages": [{"role": "user", "content": "Repeat: the quick brown fox jumps over the lazy dog"}],
  "prediction": {"type": "content", "content": "the quick brown fox jumps over the lazy dog"},
  "temperature": 0, "max_tokens": 24
}'

echo "# How likely a text is, without writing any"
post /v1/completions '{"prompt": "The sky is blue.", "max_tokens": 0, "echo": true, "logprobs": 1}'

echo "# Counters"
curl --fail-with-body -sS "$URL/metrics" -H "Authorization: Bearer ${OPENAI_API_KEY:-none}" | grep spec_decode
