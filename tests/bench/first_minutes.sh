#!/usr/bin/env bash
# The first minutes of somebody who has a wheel of Breakwater and no checkout, with the seconds that they take: a model
# server that is not ours (fakellm), init, up, a first answer; then the server is stopped, and the cause is looked for.
#
# make dist && tests/bench/first_minutes.sh dist/breakwater-*.whl      (installs into a temporary directory)
set -euo pipefail

wheel=$(realpath "$1")
directory=$(mktemp -d)
cd "$directory"
began=$(date +%s%N)
pids=()
trap 'kill "${pids[@]}" 2>/dev/null; wait; rm -rf "$directory"' EXIT

seconds() { printf '== %s: %d.%01d s\n' "$1" $((($(date +%s%N) - began) / 1000000000)) $((($(date +%s%N) - began) / 100000000 % 10)); }
show() { printf '$ %s\n' "$*"; "$@" || printf '(exit code %d)\n' $?; }

python3 -m venv breakwater && breakwater/bin/pip install --quiet "$wheel[embedded]"
seconds "Breakwater is installed"
python3 -m venv fakellm && fakellm/bin/pip install --quiet fakellm
(cd fakellm && bin/fakellm init >/dev/null && exec bin/fakellm serve --port 9777 >server.log 2>&1) &
server=$! && pids+=("$server")
until grep --quiet "running on" fakellm/server.log 2>/dev/null; do sleep 0.1; done
PATH=$directory/breakwater/bin:$PATH

began=$(date +%s%N)
show breakwater init --url http://127.0.0.1:9777/v1 --model gpt-4o-mini --agent helper --call
seconds "the config is written and checked"
breakwater up >up.log 2>&1 &
pids+=($!)
until grep --quiet "Next, in another terminal" up.log; do sleep 0.1; done
seconds "the plane is up"
show breakwater submit helper "Write a haiku about harbours."
seconds "the first answer is there"
kill "$server" && wait "$server" 2>/dev/null || true
show breakwater submit helper "Is anybody there?"
seconds "a failure is there"
show breakwater doctor
show breakwater agents
seconds "its cause is known"
