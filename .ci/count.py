"""Counts the tests of a run: ``count.py LOG REPORTS``.

LOG is the output of all steps. REPORTS has a directory for each step that runs pytest, with the JUnit reports that
pytest wrote; the command of the step names the directory. The output ends with all failures, a line each, and then
``N passed, M failed, K skipped``. The exit status is 1 if M is not 0.
"""

import re
import sys
import xml.etree.ElementTree as tree
from pathlib import Path

log, reports = map(Path, sys.argv[1:])
passed = failed = skipped = 0
#: Seconds and name of each test in Python.
times: list[tuple[float, str]] = []
#: The failed tests, in Python with the start of their message, and the failed steps.
failures: list[str] = []
#: Failed tests in Python by report directory, which the command of the step names.
failed_in_python: dict[str, int] = {}
for report in sorted(reports.glob("*/*.xml")):
    here = failed_in_python.setdefault(str(report.parent), 0)
    try:
        suites = list(tree.parse(report).getroot().iter("testsuite"))
    except tree.ParseError:
        suites, here = [], here + 1
        failures.append(f"{report}: the tests ended before their report was complete")
    for suite in suites:
        count = {name: int(suite.get(name, 0)) for name in ("tests", "failures", "errors", "skipped")}
        here += count["failures"] + count["errors"]
        passed += count["tests"] - count["failures"] - count["errors"] - count["skipped"]
        skipped += count["skipped"]
        for case in suite.iter("testcase"):
            name = f"{case.get('classname')}.{case.get('name')}"
            times.append((float(case.get("time", 0)), name))
            for told in [*case.iter("failure"), *case.iter("error")]:
                failures.append(f"{name}: {' '.join(told.get('message', '').split())[:400]}")
    failed_in_python[str(report.parent)] = here
failed = sum(failed_in_python.values())
#: Failed tests of the current step. A step that fails without a failed test (a linter, a build) counts as one.
failed_here = 0
for line in log.open(errors="replace"):
    if match := re.search(r"test result: \w+\. (\d+) passed; (\d+) failed; (\d+) ignored", line):
        good, bad, ignored = map(int, match.groups())
        passed, failed, skipped, failed_here = passed + good, failed + bad, skipped + ignored, failed_here + bad
    elif told := line.count("skipped: "):
        # A Rust test that cannot run here prints this line and returns, so its harness counts it as passed.
        passed, skipped = passed - told, skipped + told
    elif line.startswith("== failed ("):
        failures.append(line.strip())
        failed, failed_here = failed + (not failed_here), 1
    elif match := re.search(r"---- (\S+) stdout ----", line):
        failures.append(match[1])
    elif line.startswith("== took ") or re.match(r"RERUN ", line):
        print(line, end="")
    elif line.startswith("== "):
        failed_here = sum(count for folder, count in failed_in_python.items() if folder in line)
print("the 30 slowest tests in Python:")
for seconds, name in sorted(times, reverse=True)[:30]:
    print(f"{seconds:7.1f} s  {name}")
if failures:
    print("the failures:", *failures, sep="\n  ")
print(f"{passed} passed, {failed} failed, {skipped} skipped")
sys.exit(1 if failed else 0)
