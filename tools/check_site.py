"""Opens every page of the documentation site from the file system, in headless Chromium: `make site` calls it.

    python tools/check_site.py [build/site] [--pictures FOLDER]

Checks each page in windows 800 and 1600 pixels wide: there is no error on the console, every picture is shown, and
nothing is wider than the window. Also checks that links lead to pages, and to places on pages, that exist, and that the
search finds a word. Prints what is wrong, page by page. With --pictures, leaves a screenshot of each page. Needs
Chromium and its driver (Debian: chromium, chromium-driver).
"""

from __future__ import annotations

import argparse
import re
import shutil
import sys
from pathlib import Path
from urllib.parse import unquote, urlsplit

from selenium import webdriver
from selenium.common.exceptions import TimeoutException
from selenium.webdriver.common.by import By
from selenium.webdriver.support.wait import WebDriverWait

WIDTHS = (800, 1600)
HEIGHT = 1000
PICTURES = "return [...document.images].filter(each => !each.complete || !each.naturalWidth).map(each => each.src)"
TOO_WIDE = "return document.documentElement.scrollWidth - document.documentElement.clientWidth"


def browser() -> webdriver.Chrome:
    options = webdriver.ChromeOptions()
    for each in ("--headless=new", "--no-sandbox", "--disable-gpu", "--allow-file-access-from-files"):
        options.add_argument(each)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    chromium, driver = shutil.which("chromium") or shutil.which("google-chrome"), shutil.which("chromedriver")
    if chromium is None or driver is None:
        raise SystemExit("expected chromium and chromedriver (apt-get install chromium chromium-driver), got none")
    options.binary_location = chromium
    return webdriver.Chrome(options, webdriver.ChromeService(driver))


def ids_of(page: Path) -> set[str]:
    return set(re.findall(r'\b(?:id|name)="([^"]+)"', page.read_text()))


def dead_links(page: Path) -> list[str]:
    """The links of a page to files or places that do not exist. Links to other sites are not checked."""
    found = []
    for link in re.findall(r'<a\b[^>]*\bhref="([^"]+)"', page.read_text()):
        parts = urlsplit(link)
        if parts.scheme or parts.netloc:
            continue
        target = (page.parent / unquote(parts.path)).resolve() if parts.path else page
        target = target / "index.html" if target.is_dir() else target
        if not target.is_file():
            found.append(f"{link}: no such file")
        elif parts.fragment and target.suffix == ".html" and unquote(parts.fragment) not in ids_of(target):
            found.append(f"{link}: no such place")
    return found


def shown(driver: webdriver.Chrome, page: Path, width: int) -> list[str]:
    """What is wrong with a page in a window of `width` pixels."""
    driver.set_window_size(width, HEIGHT)
    driver.get(page.as_uri())
    wrong = [f"console: {entry['message']}" for entry in driver.get_log("browser") if entry["level"] == "SEVERE"]
    wrong += [f"picture not shown: {source}" for source in driver.execute_script(PICTURES)]
    if (more := driver.execute_script(TOO_WIDE)) > 0:
        wrong.append(f"{more} pixels wider than {width}")
    return wrong


def searched(driver: webdriver.Chrome, page: Path, word: str) -> list[str]:
    """What is wrong with the search of a page. The window keeps its size."""
    driver.get(page.as_uri())
    driver.find_element(By.CSS_SELECTOR, "input[name=query]").send_keys(word)
    try:
        WebDriverWait(driver, 10).until(lambda each: each.find_elements(By.CSS_SELECTOR, ".md-search-result__item"))
    except TimeoutException:
        return [f"search: nothing found of {word!r}"]
    return []


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("site", type=Path, nargs="?", default=Path("build/site"))
    parser.add_argument("--pictures", type=Path)
    args = parser.parse_args()
    site = args.site.resolve()
    pages = sorted(site.rglob("*.html"))
    if not pages:
        parser.error(f"expected pages in {site}, got none")
    driver, wrong = browser(), 0
    try:
        for page in pages:
            if page.name == "404.html":  # only servers show this page: its links begin at a server's root
                continue
            found = dead_links(page)
            for width in WIDTHS:
                found += shown(driver, page, width)
                if args.pictures:
                    args.pictures.mkdir(parents=True, exist_ok=True)
                    name = "-".join(page.relative_to(site).with_suffix("").parts)
                    driver.save_screenshot(str(args.pictures / f"{name}-{width}.png"))
            if page.name == "index.html":
                found += searched(driver, page, "placement")
            for each in found:
                print(f"{page.relative_to(site)}: {each}")
            wrong += len(found)
    finally:
        driver.quit()
    print(f"{len(pages)} pages, {wrong} faults")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
