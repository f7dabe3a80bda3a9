"""Takes the README's screenshot of a report: `python scripts/screenshot.py report.html#split=val&step=8 report.png`.

Needs selenium and Debian's chromium and chromium-driver (scripts/install_browser.sh).
"""

from __future__ import annotations

import argparse
from pathlib import Path

from selenium import webdriver
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.common.by import By


def main() -> None:
    """Opens the page in a window of the given width and saves it down to the given height."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("page", help="the file, with the view to open after #")
    parser.add_argument("out", type=Path)
    parser.add_argument("--width", type=int, default=1200)
    parser.add_argument("--height", type=int, default=0, help="pixels from the top; the whole page if not given")
    parser.add_argument("--dark", action="store_true")
    options = parser.parse_args()
    settings = webdriver.ChromeOptions()
    settings.binary_location = "/usr/bin/chromium"
    for argument in ("--headless=new", "--no-sandbox", "--hide-scrollbars"):
        settings.add_argument(argument)
    browser = webdriver.Chrome(options=settings, service=Service("/usr/bin/chromedriver"))
    try:
        scheme = "dark" if options.dark else "light"
        media = {"features": [{"name": "prefers-color-scheme", "value": scheme}]}
        browser.execute_cdp_cmd("Emulation.setEmulatedMedia", media)

        def size(height: int) -> None:
            metrics = {"width": options.width, "height": height, "deviceScaleFactor": 1, "mobile": False}
            browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)

        size(1000)
        path, _, place = options.page.partition("#")
        browser.get(f"{Path(path).resolve().as_uri()}#{place}")
        size(options.height or browser.execute_script("return document.documentElement.scrollHeight"))
        browser.find_element(By.CSS_SELECTOR, "#curves svg")
        browser.save_screenshot(str(options.out))
    finally:
        browser.quit()


if __name__ == "__main__":
    main()
