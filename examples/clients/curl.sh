#!/bin/sh
# Send one plain request and one streamed request: curl.sh [URL] [PROMPT]
# PROMPT must not need escaping in JSON.
set -eu
url=${1:-http://localhost:8080}
prompt=${2:-ROMEO:}

curl --fail-with-body --silent --show-error "$url/invocations" \
    --header 'Content-Type: application/json' \
    --data "{\"inputs\": \"$prompt\", \"parameters\": {\"max_new_tokens\": 20}}"

curl --fail-with-body --silent --show-error --no-buffer "$url/invocations" \
    --header 'Content-Type: application/json' \
    --data "{\"inputs\": \"$prompt\", \"parameters\": {\"max_new_tokens\": 20}, \"stream\": true}"
