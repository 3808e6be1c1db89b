#!/usr/bin/env bash
# The first minutes of somebody who has a wheel of Breakwater and no checkout, with the seconds that they take: a model
# server that is not ours (fakellm), init, up, a first answer; then the server is stopped, and the cause is looked for:
# in the console, signed in with the key, by following two links, and on the command line.
#
# make dist && bench/first_minutes.sh dist/breakwater_plane-*.whl      (installs into a temporary directory)
set -euo pipefail

wheel=$(realpath "$1")
directory=$(mktemp -d)
cd "$directory"
began=$(date +%s%N)
pids=()
trap 'kill "${pids[@]}" 2>/dev/null; wait; rm -rf "$directory"' EXIT

seconds() { printf '== %s: %d.%01d s\n' "$1" $((($(date +%s%N) - began) / 1000000000)) $((($(date +%s%N) - began) / 100000000 % 10)); }
show() { printf '$ %s\n' "$*"; "$@" || printf '(exit code %d)\n' $?; }
page() { curl --silent --show-error --fail --cookie cookies --cookie-jar cookies "$console$1"; }
link() { grep --only-matching --max-count 1 "href=\"$1[^\"]*\"" | head -1 | cut -d'"' -f2 | sed 's/&amp;/\&/g'; }
# What a page says between two patterns: `says PAGE FROM TO < its HTML`.
says() {
  printf '> %s\n' "$1"
  sed --quiet "/$2/,/$3/p" | sed "s/^<br>//; s/<br>/\n  /g; s/<[^>]*>//g; s/&#39;/'/g; s/&#34;/\"/g; s/&amp;/\&/g; /^\s*\$/d; s/^/  /"
}

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
show breakwater submit helper "Is anyone there?"
seconds "a failure is there"

console=$(grep --only-matching --max-count 1 'http://[0-9.:]* (sign in' up.log | cut -d' ' -f1)
curl --silent --show-error --fail --cookie-jar cookies --output /dev/null \
  --data-urlencode key@.breakwater/secrets/api-key "$console/sign-in"
# A record is in ClickHouse about a second after the job has ended.
until page "/executions?window=1h&status=dead_lettered" >list.html && [ -n "$(link "/executions/" <list.html)" ]; do sleep 0.1; done
page / >overview.html
says / 'overall-health" role' '<\/p>' <overview.html
list=$(link "/executions?status=dead_lettered" <overview.html)
printf '> %s\n' "$list"
page "$list" >list.html
execution=$(link "/executions/" <list.html)
page "$execution" >execution.html
says "$execution" 'class="notice bad"' '<\/div>' <execution.html
seconds "the console has named its cause"
show breakwater doctor
show breakwater agents
seconds "so have the commands"
