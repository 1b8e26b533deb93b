#!/bin/sh
# What `foretell serve` answers, asked with curl.
#
#     foretell serve --model smollm2          # in another terminal
#     sh examples/curl.sh
#
# OPENAI_BASE_URL and OPENAI_API_KEY say where the server is and who asks, as for OpenAI's client.
set -eu
URL=${OPENAI_BASE_URL:-http://127.0.0.1:8000/v1}
KEY=${OPENAI_API_KEY:-none}

# ask PATH [BODY]: the answer, as it comes
ask() {
    echo "--- $1" >&2
    if [ $# -gt 1 ]; then
        set -- "$1" --header 'Content-Type: application/json' --data "$2"
    fi
    path=$1
    shift
    curl --silent --show-error --fail-with-body --no-buffer \
        --header "Authorization: Bearer $KEY" "$@" "$URL$path"
    echo
}

ask /models

ask /completions '{"prompt": "The capital of France is", "max_tokens": 12, "temperature": 0}'

ask /chat/completions '{
  "messages": [
    {"role": "system", "content": "Answer in one sentence."},
    {"role": "user", "content": "What is the capital of France?"}
  ],
  "max_completion_tokens": 32,
  "temperature": 0
}'

# A stream: one event a step, with as many tokens as the step brought, and the usage at its end.
ask /chat/completions '{
  "messages": [{"role": "user", "content": "Count to ten."}],
  "max_completion_tokens": 48,
  "temperature": 0,
  "stream": true,
  "stream_options": {"include_usage": true}
}'

# What OpenAI has not: the method, and whether there are drafts at all. The field `foretell` of an
# answer says what they brought in, and what the method guarantees.
ask /completions '{
  "prompt": "def add(a, b):", "max_tokens": 24, "temperature": 0, "method": "ngram:n=3"
}'
ask /completions '{
  "prompt": "def add(a, b):", "max_tokens": 24, "temperature": 0, "speculation": "off"
}'
