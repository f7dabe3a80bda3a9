"""The report in a real browser: Debian's chromium without a window, driven by selenium."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

selenium = pytest.importorskip("selenium")
CHROMIUM, DRIVER = "/usr/bin/chromium", "/usr/bin/chromedriver"
if not (os.path.exists(CHROMIUM) and os.path.exists(DRIVER)):
    pytest.skip("no chromium here: scripts/install_browser.sh installs Debian's", allow_module_level=True)

from fakes.recorded_run import ABOUT, HOSTILE, candidate, decision, step_metrics, write_run
from selenium.webdriver import Chrome, ChromeOptions
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.common.by import By
from selenium.webdriver.support.ui import WebDriverWait
from waiting import HANG

from verl_atgrpo.lab.report.page import write
from verl_atgrpo.train.trainer.record_files import METRICS, TRAIN, RecordFiles, metrics_row


@pytest.fixture(scope="module")
def chromium() -> Iterator[Chrome]:
    options = ChromeOptions()
    options.binary_location = CHROMIUM
    for argument in ("--headless=new", "--no-sandbox", "--disable-dev-shm-usage", "--disable-gpu"):
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    browser = Chrome(options=options, service=Service(DRIVER))
    yield browser
    browser.quit()


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Returns the URL of a report with HTML in models' replies."""
    folder = tmp_path_factory.mktemp("run")
    write(write_run(folder, text=HOSTILE), folder / "report.html", 16)
    return (folder / "report.html").as_uri()


class Browser:
    """A page open in chromium."""

    def __init__(self, chromium: Chrome, address: str, width: int = 1200) -> None:
        self.chromium = chromium
        self.size(width)
        chromium.get("about:blank")
        for log in ("browser", "performance"):
            chromium.get_log(log)
        chromium.get(address)
        WebDriverWait(chromium, HANG).until(lambda _: self.all(".panel polyline"))

    def size(self, width: int) -> None:
        metrics = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False}
        self.chromium.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)

    def all(self, selector: str) -> list[Any]:
        return self.chromium.find_elements(By.CSS_SELECTOR, selector)

    def texts(self, selector: str) -> list[str]:
        return [element.get_property("textContent") for element in self.all(selector)]

    def click(self, selector: str) -> None:
        # Not by pointer: under load, headless chromium may take seconds for layout and scrolling.
        self.chromium.execute_script("arguments[0].click()", self.all(selector)[0])

    @property
    def address(self) -> str:
        return str(self.chromium.execute_script("return location.hash"))


@pytest.fixture
def browser(chromium: Chrome, page: str) -> Browser:
    return Browser(chromium, page)


def points(browser: Browser, panel: str) -> dict[str, int]:
    """Returns series -> drawn points of the panel with this title."""
    found = browser.chromium.execute_script(
        "const panels = [...document.querySelectorAll('.panel')];"
        "const box = panels.find(panel => panel.querySelector('h3').textContent === arguments[0]);"
        "return [...box.querySelectorAll('polyline')].map(l => [l.dataset.series, l.points.numberOfItems])",
        panel,
    )
    counts: dict[str, int] = {}
    for series, count in found:
        counts[series] = counts.get(series, 0) + count
    return counts


def test_curves_and_no_error_and_no_network(browser: Browser) -> None:
    assert browser.texts("#title") == ["made up"]
    assert points(browser, "Success (%)") == {"validation": 2, "training": 3}
    assert points(browser, "Reward") == {"drafter": 3, "planner": 3}
    # Step 2 was not finite: two pieces of one point.
    assert points(browser, "Gradient norm") == {"shared": 2}
    assert [label for label in browser.texts(".panel text") if label == "step"]
    errors = [entry for entry in browser.chromium.get_log("browser") if entry["level"] in ("SEVERE", "WARNING")]
    assert errors == []
    requests = [
        message["params"]["request"]["url"]
        for entry in browser.chromium.get_log("performance")
        if (message := json.loads(entry["message"])["message"])["method"] == "Network.requestWillBeSent"
    ]
    assert [url for url in requests if not url.startswith("file://")] == []
    assert len(requests) == 1


def test_branches_and_scores_hang_from_the_answers_that_they_follow(chromium: Chrome, tmp_path: Path) -> None:
    """In the order of the records: the episode, the groups of its continuations, and a judge in a score."""
    files = RecordFiles(write_run(tmp_path) / "record", 64, 3, ABOUT)
    made = [("drafter", ""), ("planner", ""), ("planner", "drafter.0=1.0/"), ("judge", "drafter.0=1.0/planner.0.2/")]
    made += [("planner", "drafter.0=0.2/"), ("judge", "planner.0.all/"), ("judge", "planner.0.1.later/")]
    answers = [candidate("a", 0.5, None), candidate("b", 1.0, 1.0), candidate("c", 0.0, None)]
    files.append(
        TRAIN, [decision(4, TRAIN, 0, n, *answers, agent=a, turn=0, scope=s) for n, (a, s) in enumerate(made)]
    )
    files.append(METRICS, [metrics_row(4, 1004.0, step_metrics(4))])
    write(tmp_path, tmp_path / "report.html", 16)
    browser = Browser(chromium, f"{(tmp_path / 'report.html').as_uri()}#split=train&step=4&task=0&episode=0")
    shown = zip(browser.texts(".card h3"), browser.texts(".card .place"), strict=True)
    depths = [card.get_attribute("class").split()[1] for card in browser.all(".card")]
    assert [(*card, depth) for card, depth in zip(shown, depths, strict=True)] == [
        ("drafter, turn 1", "", "depth0"),
        ("planner, turn 1", "after answer 2 of drafter, turn 1", "depth1"),
        ("judge, turn 1", "scores answer 3 of planner, turn 1; after answer 2 of drafter, turn 1", "depth2"),
        ("planner, turn 1", "after answer 1 of drafter, turn 1, continuation 3", "depth1"),
        ("planner, turn 1", "", "depth0"),
        ("judge, turn 1", "scores all answers of planner, turn 1", "depth1"),
        ("judge, turn 1", "settles answer 2 of planner, turn 1", "depth1"),
    ]


def test_values_under_the_pointer(browser: Browser) -> None:
    browser.chromium.execute_script(
        "const svg = document.querySelector('.panel svg'); const box = svg.getBoundingClientRect();"
        "svg.dispatchEvent(new PointerEvent('pointermove', {clientX: box.right - 1, clientY: box.top + 50}))"
    )
    assert browser.texts(".panel:first-child .legend li") == ["validation100", "training75", "at step 3"]


def test_whole_numbers_are_shown_whole(browser: Browser) -> None:
    shown = browser.chromium.execute_script("return [1236, 12345, 0.98765, 1e7, -0.00001].map(short)")
    assert shown == ["1236", "12345", "0.988", "1.0e+7", "-1.0e-5"]


def test_values_that_differ_by_rounding_have_an_axis(browser: Browser) -> None:
    """Of such a range there are no round numbers in between: their list had no end."""
    script = "const [low, high] = range(arguments[0], false); return ticks(low, high, 4)"
    for values in ([1, 1 - 3.33e-16], [0.1, 0.1 + 1.4e-17], [-5, -5 + 1e-14], [0, 0]):
        marks = browser.chromium.execute_script(script, values)
        assert 2 <= len(marks) <= 6 and marks[0] < values[0] < marks[-1]
    assert browser.chromium.execute_script(script, [1, 1.001]) == pytest.approx([1, 1.0005, 1.001], abs=3e-4)


def test_earlier_and_later_steps_of_a_task(browser: Browser) -> None:
    # The last validation is open; one step earlier is the first one, of the same task.
    assert browser.texts("#shown strong") == ["Step 3, task 0"]
    assert browser.texts("#shown .badge") == ["solved"]
    browser.click(".map tbody tr:nth-child(2) td:last-child button")
    assert browser.texts("#shown strong") == ["Step 3, task 1"]
    browser.click("#previous")
    assert browser.texts("#shown strong") == ["Step 0, task 1"]
    assert browser.texts("#shown .badge") == ["not solved"]
    assert browser.address == "#split=val&step=0&task=1&episode=0"
    assert browser.all("#previous")[0].get_property("disabled")
    browser.click("#next")
    assert browser.texts("#shown strong") == ["Step 3, task 1"]
    assert browser.texts(".map td") == ["✗", "✓", "✗", "✓"]


def test_candidates_of_a_decision(browser: Browser) -> None:
    browser.click("#split-train")
    assert browser.texts("#shown strong") == ["Step 3, task 43"]
    assert browser.texts(".card h3") == ["drafter, turn 1", "planner, turn 1", "drafter, turn 2"]
    assert browser.texts(".card:first-of-type tr.committed td:last-child") == ["+0.7"]
    assert browser.texts(".card:first-of-type tbody tr:last-child td") == ["2 bad", "3", "-0.25", "0.25", "0", "-0.7"]
    answer = ".card:first-of-type pre.text"
    assert browser.texts(answer) == [f"good {HOSTILE}"]
    browser.click(".card:first-of-type tbody tr:last-child button")
    assert browser.texts(answer) == ["bad"]
    assert browser.texts(".card:first-of-type tr.chosen td:last-child") == ["-0.7"]
    assert browser.texts(".card:first-of-type .answer .label") == ["answer 2, not committed"]


def test_an_address_opens_its_episode(chromium: Chrome, page: str) -> None:
    browser = Browser(chromium, f"{page}#split=train&step=2&task=42&episode=0")
    assert browser.texts("#shown strong") == ["Step 2, task 42"]
    browser.chromium.execute_script("location.hash = '#split=val&step=0&task=1&episode=0'")
    WebDriverWait(chromium, HANG).until(lambda _: browser.texts("#shown strong") == ["Step 0, task 1"])
    assert Browser(chromium, f"{page}#split=val&step=99").texts("#shown strong") == ["Step 3, task 0"]


def test_html_in_replies_is_shown_and_not_run(browser: Browser) -> None:
    assert browser.texts("pre.text")[0].startswith(HOSTILE)
    assert browser.all("img") == []
    assert browser.chromium.execute_script("return window.hit === undefined")
    # Even as HTML it would not run.
    browser.chromium.execute_script(
        "document.body.insertAdjacentHTML('beforeend', '<img src=x onerror=window.hit=1>')"
    )
    violated = WebDriverWait(browser.chromium, HANG).until(
        lambda _: [
            entry for entry in browser.chromium.get_log("browser") if "Content Security Policy" in entry["message"]
        ]
    )
    assert violated
    assert browser.chromium.execute_script("return window.hit === undefined")


@pytest.mark.parametrize("split", ["val", "train"])
def test_a_phone_needs_no_horizontal_scrolling(chromium: Chrome, page: str, split: str) -> None:
    browser = Browser(chromium, page, width=360)
    browser.click(f"#split-{split}")
    wide = browser.chromium.execute_script(
        "return [...document.querySelectorAll('body *')].filter(e => !e.closest('.map, svg, pre')"
        " && e.getBoundingClientRect().right > document.documentElement.clientWidth)"
        ".map(e => e.outerHTML.slice(0, 120))"
    )
    assert wide == []
    root = "document.documentElement"
    assert browser.chromium.execute_script(f"return {root}.scrollWidth <= {root}.clientWidth")
