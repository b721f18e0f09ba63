package checkup

import (
	"cmp"
	"fmt"
	"slices"
	"strings"
)

// Severity is how bad a finding is.
type Severity string

// The severities.
const (
	OK       Severity = "ok"
	Warning  Severity = "warning"  // nothing fails now; somebody should act
	Critical Severity = "critical" // something fails, or soon will
)

func (s Severity) rank() int { return slices.Index([]Severity{OK, Warning, Critical}, s) }

// ExitCode is that of commands that report findings. 1 stays for a command that could not do its work.
func (s Severity) ExitCode() int { return [...]int{0, 2, 3}[s.rank()] }

// Finding is something that is wrong, or that could not be checked.
type Finding struct {
	ID       string   `json:"id"` // stable; see the catalogue
	Severity Severity `json:"severity"`
	Subject  string   `json:"subject"` // of what: a certificate, key, file or cluster
	Problem  string   `json:"problem"`
	Meaning  string   `json:"meaning"`
	Remedy   string   `json:"remedy"`
}

// Found makes a finding of the catalogue. The problem follows the subject in a sentence.
func Found(id string, s Severity, subject, problem string, args ...any) Finding {
	e, ok := entry(id)
	if !ok {
		panic("checkup: there is no finding " + id) // a test makes each
	}
	return Finding{id, s, subject, OneLine(fmt.Sprintf(problem, args...)), e.Meaning, e.Remedy}
}

// OneLine writes what several joined errors say in one line.
func OneLine(s string) string { return strings.ReplaceAll(strings.TrimRight(s, "\n"), "\n", "; ") }

// Unchecked is the finding that something could not be checked.
func Unchecked(what string, why error) Finding {
	return Found("unchecked", Warning, what, "could not be checked: %v", why)
}

// Sort puts the worst first; those alike stay in their order.
func Sort(all []Finding) {
	slices.SortStableFunc(all, func(a, b Finding) int { return cmp.Compare(b.Severity.rank(), a.Severity.rank()) })
}

// Worst is the worst severity among findings.
func Worst(all []Finding) Severity {
	worst := OK
	for _, f := range all {
		if f.Severity.rank() > worst.rank() {
			worst = f.Severity
		}
	}
	return worst
}

// CountOf returns how many findings there are of a severity.
func CountOf(all []Finding, s Severity) (n int) {
	for _, f := range all {
		if f.Severity == s {
			n++
		}
	}
	return n
}
