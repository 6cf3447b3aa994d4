"""Whether each attack's test fails where the guard against it is taken away.

``python -m simulations.attacks.guards`` copies the checkout and removes one guard at a time: the
tests of the attack must pass with the guard and fail without it. Prints a JSON line a guard; the
exit status is 1 if the tests passed without one.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from fedapp.settings import app_folder
from simulations.bench.mutants import Mutant, fails, kill


@dataclass(frozen=True, slots=True)
class Guard:
    """What stops an attack: the text ``before`` in a source; without it, ``after``."""

    attack: str
    source: str
    before: str
    tests: str
    after: str = "if False:"

    def removed_from(self, root: Path) -> Mutant:
        """The mutant of the sources without this guard.

        Raises
        ------
        ValueError : the text is not in the source exactly once.
        """
        text = (root / self.source).read_text()
        if text.count(self.before) != 1:
            raise ValueError(f"{self.source} must have {self.before!r} once")
        start = len(text[: text.index(self.before)].encode())
        line, end = text[: text.index(self.before)].count("\n") + 1, len(self.before.encode())
        return Mutant(self.source, line, self.before, self.after, start, start + end)


GUARDS = (
    Guard(
        "the coordinator runs an edited copy of the app",
        "fedapp/site/bundle.py",
        "if found not in known and not is_signed(bundle, config.release_keys):",
        "tests/test_bundle.py",
    ),
    Guard(
        "the coordinator poses as the active party and tries ids of a dictionary",
        "fedapp/site/mail.py",
        "if got == pinned:",
        "tests/test_trust.py",
        "if True:",
    ),
    Guard(
        "the coordinator tells parties of different runs",
        "fedapp/crypto/sealed.py",
        "salt = hashlib.sha256(opening).digest()",
        "tests/test_trust.py",
        'salt = hashlib.sha256(b"").digest()',
    ),
    Guard(
        "who steals long-lived keys reads letters of runs that have ended",
        "fedapp/crypto/sealed.py",
        "products = both + crossed + _product(private.static, peer.static)",
        "tests/test_sealed.py",
        "products = _product(private.static, peer.static)",
    ),
    Guard(
        "the keys of a run stay on the disk after its end",
        "fedapp/site/answer.py",
        "end_session(store)\n        laid_out",
        "tests/test_mail.py",
        "pass\n        laid_out",
    ),
    Guard(
        "a letter is delivered again",
        "fedapp/site/mail.py",
        "if address.step <= before.get(sender, 0) or parcel in seen:",
        "tests/test_mail.py",
    ),
    Guard(
        "a letter of a start that is over is delivered after a step back",
        "fedapp/site/mail.py",
        "if not address.last and is_over:",
        "tests/test_mail.py",
    ),
    Guard(
        "an ended run is asked another question",
        "fedapp/site/answer.py",
        "if digest != _digest(request):",
        "tests/test_mail.py",
    ),
    Guard(
        "a run that is allowed sends messages of a method that is not",
        "fedapp/site/settings.py",
        "    if not sends:",
        "tests/test_site.py",
        "    if False:",
    ),
    Guard(
        "a run of a method that is not allowed begins",
        "fedapp/site/settings.py",
        "if not config.simulated and (refused := wanted - config.allowed):",
        "tests/test_site.py",
        "if refused := set():",
    ),
    Guard(
        "the coordinator asks for more bins, rows or columns than the site allows",
        "fedapp/site/settings.py",
        "if (value := getattr(request, name)) > config.limits[limit.setting]:",
        "tests/test_site.py",
        "if (value := getattr(request, name)) > 2**62:",
    ),
    Guard(
        "the coordinator asks for small keys, or for Fed-EINI without its guard",
        "fedapp/site/settings.py",
        "if not config.allows_insecure and rule.covers(value := getattr(request, name)):",
        "tests/test_site.py",
        "if False and rule.covers(value := getattr(request, name)):",
    ),
    Guard(
        "a subset of few rows is scored",
        "fedapp/site/settings.py",
        'if count < fewest and (count or subset == "train"):',
        "tests/test_site.py",
    ),
    Guard(
        "a run begins that nobody has approved",
        "fedapp/site/register.py",
        "if not run.admitted:",
        "tests/test_register.py",
    ),
    Guard(
        "runs that hold back other rows tell the labels of those in which they differ",
        "fedapp/site/register.py",
        "if splits and run.split and run.split not in splits:",
        "tests/test_register.py",
    ),
    Guard(
        "masked runs with and without a party tell its sums",
        "fedapp/site/register.py",
        "if masked and run.roster and all(one.roster != run.roster for one in masked):",
        "tests/test_register.py",
    ),
    Guard(
        "private runs come to more than a site allows",
        "fedapp/site/register.py",
        "if total > config.total_epsilon:",
        "tests/test_register.py",
    ),
    Guard(
        "more runs begin in a day than the site allows",
        "fedapp/site/register.py",
        "if n_today(earlier) >= most:",
        "tests/test_register.py",
    ),
    Guard(
        "a model to score has other columns, classes or another objective than the run",
        "clients/scoring.py",
        "if found != run:",
        "tests/test_bounds.py",
    ),
    Guard(
        "values have fewer columns than a model splits by",
        "fedapp/trees/predict.py",
        "if values.shape[1] < len(model.columns):",
        "tests/test_bounds.py",
    ),
    Guard(
        "a public key is longer than agreed",
        "fedapp/crypto/paillier.py",
        "if len(modulus) != (bits + 7) // 8:",
        "tests/test_paillier.py",
    ),
    Guard(
        "a public key is no product of two large primes",
        "fedapp/crypto/paillier.py",
        "if has_small_factor or gmpy2.is_power(key.n) or gmpy2.is_prime(key.n):",
        "tests/test_paillier.py",
    ),
    Guard(
        "splits told to one party alone leave its rows alone in the sums of a later step",
        "fedapp/site/sums.py",
        "asked = store.facts[ASKED]",
        "tests/test_masks.py",
        "asked = digest",
    ),
    Guard(
        "bins of another party are more than the run can need",
        "clients/secureboost/active.py",
        "if n_columns > most or (bins.widths[~by_category] > max_bin).any():",
        "tests/test_bounds.py",
    ),
    Guard(
        "the coordinator asks again without a party, for sums under the masks of before",
        "fedapp/site/sums.py",
        "for part in (*when, asked)",
        "tests/test_masks.py",
        "for part in (asked,)",
    ),
    Guard(
        "the coordinator asks parties for different sums",
        "fedapp/site/sums.py",
        "for part in (*when, asked)",
        "tests/test_masks.py",
        "for part in when",
    ),
    Guard(
        "a run of masked sums asks a party for its own",
        "fedapp/site/sums.py",
        'if is_masked(store) and request.leaves == "own":',
        "tests/test_masks.py",
    ),
    Guard(
        "a run asks for more than sums where a site lets nothing else leave it",
        "fedapp/site/settings.py",
        'if config.least_parties and (plain or request.leaves == "own"):',
        "tests/test_pax_secure.py",
    ),
    Guard(
        "sums are over too few parties to hide one of them",
        "fedapp/site/settings.py",
        "if len(set(names)) < fewest:",
        "tests/test_pax_secure.py",
    ),
    Guard(
        "squares of inputs are summed around one mean after the other",
        "clients/fedavg_linear.py",
        "if MEANS_RECEIVED in store.facts:",
        "tests/test_fedavg_linear_secure.py",
    ),
    Guard(
        "a party's model is multiplied until its sum no longer fits",
        "clients/fedavg_linear.py",
        "if most < 0 or weight > 2**most:",
        "tests/test_fedavg_linear_secure.py",
    ),
    Guard(
        "a lost party's late answer completes the sum that the rest was asked for again",
        "fedapp/crypto/masking.py",
        "    if seed:\n        masked +=",
        "tests/test_shares.py",
        "    if False:\n        masked +=",
    ),
    Guard(
        "the coordinator goes back and opens one run after another, which the site counts as one",
        "fedapp/site/mail.py",
        "if digests.get(what, digest := _digest(request)) != digest:",
        "tests/test_mail.py",
        "digest = _digest(request)\n    if False:",
    ),
    Guard(
        "the coordinator opens a run again, and gives up one party after the other",
        "clients/secagg.py",
        "site.store.facts.setdefault(AMONG, sorted(roster.names))",
        "tests/test_shares.py",
        "site.store.facts[AMONG] = sorted(roster.names)",
    ),
    Guard(
        "the coordinator has all parties but one hold nearly all of their rows back",
        "clients/handshake.py",
        "    note_greeting(site.store, request)\n",
        "tests/test_masks.py",
        '    site.store.facts["told"] = ""\n',
    ),
    Guard(
        "the coordinator skips steps, and asks for a sum again without a party",
        "fedapp/site/sums.py",
        "if one[0] > after]",
        "tests/test_shares.py",
        "if one[0] > store.step]",
    ),
    Guard(
        "the coordinator unmasks a sum with a party, and then without it",
        "fedapp/site/sums.py",
        "pending = store.facts.pop(PENDING)",
        "tests/test_shares.py",
        "pending = store.facts[PENDING]",
    ),
    Guard(
        "parts of a sum are unmasked without a party that is in the whole",
        "fedapp/site/sums.py",
        "not follows or parties == among",
        "tests/test_shares.py",
        "True",
    ),
    Guard(
        "a resumed run unmasks without a party what it has unmasked with it",
        "fedapp/site/sums.py",
        "if before == asked and of_whom != names:",
        "tests/test_lost_parties.py",
    ),
    Guard(
        "a coordinator that tells parties of different losses gets sums of few",
        "fedapp/site/settings.py",
        "if not fewest <= threshold <= n_parties:",
        "tests/test_shares.py",
    ),
    Guard(
        "a run may make leaves of fewer rows than a site asks for",
        "fedapp/site/settings.py",
        "if (value := getattr(request, name)) < (least := config.floors[floor.setting]):",
        "tests/test_min_child_rows.py",
        "if (value := getattr(request, name)) < (least := 0):",
    ),
    Guard(
        "the active party splits a column so that few rows are on one side",
        "clients/secureboost/passive.py",
        "if min(counts[is_right].sum(), counts[~is_right].sum()) < least:",
        "tests/test_secureboost_floors.py",
    ),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--only", default="", help="guards in sources whose path has this text")
    options = parser.parse_args()
    guards = [one for one in GUARDS if options.only in one.source]
    n_noticed = 0
    with tempfile.TemporaryDirectory() as folder:
        checkout = Path(folder) / "checkout"
        ignored = shutil.ignore_patterns(".*", "runs", "build")
        shutil.copytree(app_folder(), checkout, ignore=ignored)
        for tests in sorted({one.tests for one in guards}):
            if fails([tests], checkout):
                sys.exit(f"{tests} must pass while every guard is there")
        for guard in guards:
            noticed = kill(guard.removed_from(checkout), checkout, [guard.tests], near_first=False)
            n_noticed += noticed
            print(json.dumps({"attack": guard.attack, "tests fail": noticed}), flush=True)
    print(f"the tests fail without {n_noticed} of {len(guards)} guards, each taken away alone")
    sys.exit(n_noticed < len(guards))


if __name__ == "__main__":
    main()
