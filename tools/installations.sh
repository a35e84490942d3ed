#!/bin/sh
# The tests in environments that users have and `make test` does not: each is made once, again when pyproject.toml changes.
#   tools/installations.sh PREFIX PYTHON ENVIRONMENTS PYTEST-ARGUMENTS...      (with SUBSET set, one that cannot be made is no failure)
set -u
prefix=$1 python=$2 names=$3
shift 3

# The lowest versions that pyproject.toml allows, as constraints.
lowest() {
	"$python" -c '
import re, tomllib
project = tomllib.load(open("pyproject.toml", "rb"))["project"]
extras = project["optional-dependencies"]
for needed in (project["dependencies"], *(extras[name] for name in ("eval", "migrate", "otel", "serve"))):
    for name, version in re.findall(r"^([\w-]+)\S*?>=([\d.]+)", "\n".join(needed), re.M):
        print(f"{name}=={version}")'
}

# Python $1, where this machine has one that runs.
find_python() {
	for found in "python$1" "$HOME/.pyenv/versions/$1".*/bin/python; do
		"$found" -c '' 2>/dev/null && echo "$found" && return
	done
}

# The environment $1 in the folder $2, with the interpreter $3.
make_environment() {
	pip="$2/bin/python -m pip install -q"
	rm -rf "$2" && "$3" -m venv "$2" && $pip --upgrade 'pip>=25.1' || return 1
	case $1 in
	core) $pip -e . --group test ;;
	lowest) lowest >"$2/constraints.txt" &&
		$pip -c "$2/constraints.txt" -e '.[light]' --group test pycocotools cryptography 'tritonclient[http]>=2.60,<2.72' ;;
	gpu-package) $pip -e '.[light]' --group dev && "$2/bin/python" -m pip uninstall -q -y onnxruntime &&
		$pip "onnxruntime-gpu$(sed -n 's/^  "onnxruntime\(.*\)",$/\1/p' pyproject.toml)" ;;
	*) $pip -e '.[light]' --group dev ;;
	esac
}

# The tests $2... in the environment $1, without those of servers where there is no client for them.
run_tests() {
	folder=$1 left=$(($# - 1))
	shift
	while [ $left -gt 0 ]; do
		word=$1 left=$((left - 1))
		shift
		case $word in tests/serving/*) "$folder/bin/python" -c 'import tritonclient' 2>/dev/null || continue ;; esac
		set -- "$@" "$word"
	done
	"$folder/bin/python" -m pytest "$@"
}

failed=0 summary=
for name in $names; do
	folder=$prefix-$name interpreter=$python
	case $name in python*) interpreter=$(find_python "${name#python}") ;; esac
	if [ -z "$interpreter" ]; then
		outcome="not run: this machine has no $name"
	elif ! cmp -s pyproject.toml "$folder/.ready" && ! { make_environment "$name" "$folder" "$interpreter" && cp pyproject.toml "$folder/.ready"; }; then
		outcome="not run: the environment could not be made"; [ -n "${SUBSET-}" ] || failed=1
	else
		[ $# = 0 ] || run_tests "$folder" "$@" >"$folder/tests.log" 2>&1 || { failed=1 && cat "$folder/tests.log"; }
		[ $# = 0 ] && outcome=made || outcome=$(tail -n 1 "$folder/tests.log")
	fi
	summary="$summary$name: $outcome
"
done
printf %s "$summary"
exit "$failed"
