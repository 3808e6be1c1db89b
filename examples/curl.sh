#!/bin/sh
# Submits a job over HTTP with curl, then reads its result by id. Needs curl and sed.
#
# Start with `make up`, then: sh examples/curl.sh [DATA_DIR]
set -eu

data=${1:-$(dirname "$0")/../.breakwater}
url=$(sed -n 's/.*"request_url": "\(.*\)".*/\1/p' "$data/endpoints.json")
job_id="curl-$(date +%s)-$$"

# The key is passed on stdin: anyone who lists processes could read an argument.
call() {
  printf 'Authorization: Bearer %s' "$(cat "$data/secrets/api-key")" |
    curl --silent --show-error --fail-with-body --header @- --header 'Content-Type: application/json' "$@"
}

# 200 with the result if the job ends within wait_s, else 202. The same job_id again would return the same execution.
call "$url/api/v1/jobs?wait_s=20" \
  --data "{\"agent\": \"content-writer\", \"job_id\": \"$job_id\", \"prompt\": \"Write a haiku about harbours.\"}"
echo
call "$url/api/v1/jobs/$job_id"
echo
