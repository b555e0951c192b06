"""The words of the playground: what the tiny base's tokenizer is frozen on. Changing this file means rebuilding the base.

Purpose: entities are capitalised pseudo-words, like names that a real model has met as words but not in these tasks; each split has its
own. All other words are ordinary and shared. There is room for sites that do not exist yet.
"""

import random

from rmsweb.records import Split

_COMMON = """
a about account action add address after agency air alert alerts all also an and answer any apply applicant archive area armchair article articles as ask
at author autumn back bag banner baker basket bed before bench best between big bill black blank blanket block blog blue board boat book books boots
bottle box branch bread bridge bronze brown browse browser building bus button buy by calm camera cancel capital car card careers cars cart cashier cat
categories category chair chairs change cheap check checkout choose cite city clear clerk click clinic clock close closed coast coat code cold color
column compare companies company confirm confirmed contact contacts continue copy corner cost cotton country course cream credit crimson cup curtain
customer cyan daily dark date day days deal deals default delete deliver delivery department desk destination details digital dinner discover district
document documents donate done door down download drawer driver dry early east edit editor elder elevation empty end engine enter entry error evening event
events express fair family fare fast fee feed fever few field file files fill filter filters find fine finish fire first fish flat flight flights floor
flower follow footer for forest form forms found founded fresh from front full galaxy garden gate get gift glass go gold gray green grid ground group guest
guide hall hand hardware harbor head heading health heavy height help her here high hill hills history home hotel hour hours house how human ice id if image
in index info input inquiry is island issue it item items ivory jacket job jobs join journal key keys kind kitchen lake lamp lamps language large last late
latest law leather left length less letter level library light lilac lime line linen link links list little local location log login logout long lookup lot low
magenta mail main manager map maps market maroon mason maximum me medium member menu message metal middle mint minimum mobile month monthly more morning
mountain mountains move museum music my name narrow navy near nearby new news next night no none normal north not note notes nothing notice now number nurse
oak ocean of off offer offers office offices official ok old olive on once one online only open option options or orange order ordered orders other our out
over owner pack page pages paint painter palace paper park part partner pass past path pay payment peak people permit person phone photo photos pick piece
pilot pine pink place places plan plans plate please plum point popular population portal position post pre preview previous price print private product
products profile public purple quality quantity query question quick quiet rail rain random rank rate rating read ready receipt record records red reference
refund region regions register related remove rent report request reserve reset result results return review reviews right river road role room rooms rose
round route row rule safe salary sale sales salmon sand save saved search season seat second section see select sell send sent separate service services
settings shade share shelf shift ship shipping shoe shoes shop shops short show sign silver simple site sites size sizes sky slim slow small sofa soft sold
some sort source south spring stage staff standard star stars start state station status stay step steps stock stone store stories story street student
style subject submit success summary summer support surname table tables tag talk tall tax teacher team tell text than thank that the then there these this
ticket tickets time title to today tools top topic total tower town trade train travel tree trip try tutor type under union unit until up update upper us user
vacancies valley value vase view villa village violet visit volume waiter walk wall warm watch water way weather week weekly welder welcome west what wheel
when where which white wide width wiki wild wind window winter wish wishlist with wood wool word work worker world write year yellow yes you young your zone
""".split()  # noqa: SIM905

NUM_ENTITIES = {"train": 240, "dev": 40, "held-out": 140}


def _names(count: int, seed: int) -> list[str]:
    """Distinct pronounceable capitalised words, none of them in the common list."""
    r, names = random.Random(seed), dict[str, None]()
    while len(names) < count:
        name = "".join(r.choice("bdfgklmnprstvz") + r.choice("aeiou") for _ in range(2)) + r.choice(("", "n", "r", "s", "x", "l"))
        if name not in _COMMON:
            names[name.capitalize()] = None
    return list(names)


_NAMES = _names(sum(NUM_ENTITIES.values()), 1)


def entities(split: Split) -> list[str]:
    """The names that tasks and pages of a split are made of; no name is in two splits."""
    start = 0
    for name, count in NUM_ENTITIES.items():
        if name == split:
            return _NAMES[start : start + count]
        start += count
    raise ValueError(f"split {split!r}: expected one of {', '.join(NUM_ENTITIES)}")


def vocabulary() -> list[str]:
    """Every word that the tokenizer knows, sorted."""
    return sorted(
        {*_COMMON, *(word.capitalize() for word in ("at", "on", "in", "go", "open", "find", "buy", "tell", "use", "log", "apply", "please", "visit")), *_NAMES}
    )
