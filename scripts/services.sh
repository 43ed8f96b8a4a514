#!/usr/bin/env bash
# Install what the tests with real servers need, once: Debian's packages, if root runs this, Cassandra's jars from Maven,
# and generators of clients in Go and TypeScript. With arguments, install these alone: programs of the list below,
# `cassandra`, `clients`. Nothing is started: tests start and end their own servers. Missing servers are named. Tests
# that need them are skipped, or fail if TIMELINE_REQUIRE_SERVICES asks for them.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
exec 1>&2

# Program, and the package that has it.
declare -A package=()
while read -r program name; do
    [[ -z $program ]] || package[$program]=$name
done <<'LIST'
postgres postgresql
redis-server redis-server
beanstalkd beanstalkd
mariadbd mariadb-server
redis-cli redis-tools
faketime faketime
etcd etcd-server
etcdctl etcd-client
ip iproute2
iptables iptables
openssl openssl
go golang-go
node nodejs
npm npm
socat socat
xxd xxd
prometheus prometheus
java openjdk-17-jre-headless
chromium chromium
mvn maven
LIST

wanted=("$@")
((${#wanted[@]})) || wanted=("${!package[@]}" cassandra clients)
wants() { [[ " ${wanted[*]} " == *" $1 "* ]]; }
for name in "${wanted[@]}"; do
    if [[ ! -v package[$name] && $name != cassandra && $name != clients ]]; then
        echo "services: $name is none of these: $(printf '%s\n' "${!package[@]}" cassandra clients | sort | paste -sd ' ')"
        exit 2
    fi
done

found() { command -v "$1" >/dev/null || compgen -G "/usr/sbin/$1" >/dev/null || compgen -G "/usr/lib/postgresql/*/bin/$1" >/dev/null; }

missing=()
for program in "${!package[@]}"; do
    wants "$program" && ! found "$program" && missing+=("${package[$program]}")
done
if ((${#missing[@]})); then
    if [[ $(id -u) -eq 0 ]] && command -v apt-get >/dev/null; then
        echo "services: installing ${missing[*]}"
        # Debian starts a server after its installation, unless this forbids it.
        policy=/usr/sbin/policy-rc.d
        if [[ ! -e $policy ]]; then
            printf '#!/bin/sh\nexit 101\n' >"$policy"
            chmod +x "$policy"
            trap 'rm -f "$policy"' EXIT
        fi
        apt-get update -qq
        DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "${missing[@]}" </dev/null >/dev/null
    else
        echo "services: missing. Install them: sudo apt-get install -y ${missing[*]}"
    fi
fi

# Debian has no package of Cassandra, so its jars are fetched once. A download that breaks off leaves no whole folder.
version=5.0.9
lib=build/cassandra/$version/lib
if wants cassandra && [[ ! -d $lib ]]; then
    if command -v mvn >/dev/null; then
        echo "services: fetching Cassandra $version into $lib"
        rm -rf "$lib.part"
        if mvn -q -B -f scripts/cassandra/pom.xml dependency:copy-dependencies -DincludeScope=runtime \
            "-DoutputDirectory=$PWD/$lib.part" </dev/null; then
            mv "$lib.part" "$lib"
        else
            echo "services: Maven could not fetch Cassandra; the tests that need it are skipped"
        fi
    else
        echo "services: the tests with Cassandra need Maven, then: make services"
    fi
fi

wants clients || exit 0

# Generators of HTTP clients and what the clients need, at the versions of go.sum and package-lock.json.
clients=build/clients
go=tests/gateway/clients/go
if [[ ! -x $clients/go/oapi-codegen || $go/go.sum -nt $clients/go/oapi-codegen ]] && command -v go >/dev/null; then
    echo "services: building a generator of Go clients into $clients/go"
    mkdir -p "$clients/go"
    if ! (cd $go && go mod download && go build -o "$OLDPWD/$clients/go/" tool); then
        echo "services: Go could not build it (it needs Go 1.26); the tests that need it are skipped"
    fi
fi
node=tests/gateway/clients/typescript
if [[ ! -e $clients/typescript/done || $node/package-lock.json -nt $clients/typescript/done ]] && command -v npm >/dev/null; then
    echo "services: fetching a generator of TypeScript clients into $clients/typescript"
    mkdir -p "$clients/typescript"
    cp $node/package.json $node/package-lock.json $node/.npmrc "$clients/typescript/"
    if npm ci --prefix "$clients/typescript" --silent --no-audit --no-fund --ignore-scripts </dev/null; then
        touch "$clients/typescript/done"
    else
        echo "services: npm could not fetch it; the tests that need it are skipped"
    fi
fi
