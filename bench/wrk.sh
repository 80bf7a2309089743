#!/bin/sh
# Loads one URL with wrk: 64 connections post the 8 KB chat of bench/chat.json, as
# fast as answers come. Needs wrk (bench/install-peers.sh installs it).
#
# Usage: bench/wrk.sh [URL] [wrk's options]
#   bench/wrk.sh http://localhost:8080 -c 128 -d 60s
set -eu
cd "$(dirname "$0")/.."
url=http://localhost:8080
case ${1-} in http*) url=${1%/}; shift ;; esac
command -v wrk >/dev/null || { echo "wrk.sh: wrk is not installed: see bench/install-peers.sh" >&2; exit 1; }
exec wrk -t 2 -c 64 -d 30s --latency -s bench/chat.lua "$@" "$url/v1/chat/completions"
