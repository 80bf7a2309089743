#!/bin/sh
# Loads one URL with vegeta: the 8 KB chat of bench/chat.json at a constant rate,
# whether answers come or not. Needs vegeta, in PATH or where
# bench/install-peers.sh puts it.
#
# Usage: bench/vegeta.sh [URL] [RATE] [DURATION]
#   bench/vegeta.sh http://localhost:8080 200 30s
set -eu
cd "$(dirname "$0")/.."
PATH=$PATH:$PWD/.bin/peers/bin
command -v vegeta >/dev/null || { echo "vegeta.sh: vegeta is not installed: see bench/install-peers.sh" >&2; exit 1; }
url=${1:-http://localhost:8080}
echo "POST ${url%/}/v1/chat/completions" |
	vegeta attack -body bench/chat.json -header 'Content-Type: application/json' -rate "${2:-200}" -duration "${3:-30s}" |
	vegeta report
