#!/usr/bin/env bash
# Gets what the tests with real servers need, once: Debian's packages, where root may install them, and Cassandra's jars
# from Maven. Starts nothing: the tests start their own servers and end them. What cannot be had is named, and the tests
# that need it are skipped, or fail where TIMELINE_REQUIRE_SERVICES asks for it.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
exec 1>&2

# program: where to look for it; package: who has it.
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
prometheus prometheus
java openjdk-17-jre-headless
chromium chromium
mvn maven
LIST

found() { command -v "$1" >/dev/null || compgen -G "/usr/sbin/$1" >/dev/null || compgen -G "/usr/lib/postgresql/*/bin/$1" >/dev/null; }

missing=()
for program in "${!package[@]}"; do
    found "$program" || missing+=("${package[$program]}")
done
if ((${#missing[@]})); then
    if [[ $(id -u) -eq 0 ]] && command -v apt-get >/dev/null; then
        echo "services: installing ${missing[*]}"
        # Debian starts a server once it is installed, unless this says no.
        policy=/usr/sbin/policy-rc.d
        if [[ ! -e $policy ]]; then
            printf '#!/bin/sh\nexit 101\n' >"$policy"
            chmod +x "$policy"
            trap 'rm -f "$policy"' EXIT
        fi
        apt-get update -qq
        DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "${missing[@]}" </dev/null >/dev/null
    else
        echo "services: the tests with real servers need: sudo apt-get install -y ${missing[*]}"
    fi
fi

# Cassandra is no package of Debian's: its jars, once. A copy that was broken off leaves no folder that looks whole.
version=5.0.9
lib=build/cassandra/$version/lib
if [[ ! -d $lib ]]; then
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
