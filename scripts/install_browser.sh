#!/usr/bin/env bash
# Installs Debian's chromium and its driver for the report's browser tests, which are skipped on other systems.
set -euo pipefail

skip() {
    echo "the report's browser tests will be skipped: $1" >&2
    exit 0
}

[ -x /usr/bin/chromium ] && [ -x /usr/bin/chromedriver ] && exit 0
command -v apt-get >/dev/null || skip "chromium and chromium-driver are installed on Debian only"
[ "$(id -u)" = 0 ] || skip "run 'apt-get install chromium chromium-driver' as root to have them"
apt-get update -qq >/dev/null && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends \
    chromium chromium-driver >/dev/null || skip "apt-get could not install chromium and chromium-driver"
