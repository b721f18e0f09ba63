package client

import (
	"encoding/base64"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"

	"golang.org/x/mod/sumdb/note"
)

// Bounds of what is kept of issuance logs.
const (
	maxCheckpoint = 4 << 10 // bytes of one
	maxLogs       = 100
)

// checkpoint is a signed statement of an issuance log, as the server gave it (C2SP tlog-checkpoint). Its signature is
// not verified: the agent does not hold the logs' keys. What it can tell is whether two of them contradict each other.
type checkpoint struct {
	origin string
	size   int64
	root   string
	keys   []uint32 // hashes of the keys by which the origin signed
	text   string   // all of it
}

// parseCheckpoint reads a checkpoint.
func parseCheckpoint(text string) (*checkpoint, error) {
	if len(text) > maxCheckpoint {
		return nil, fmt.Errorf("it has %d bytes; at most %d are read", len(text), maxCheckpoint)
	}
	_, err := note.Open([]byte(text), note.VerifierList())
	unverified, ok := errors.AsType[*note.UnverifiedNoteError](err)
	if !ok {
		return nil, errors.New("it is not a signed note")
	}
	lines := strings.Split(unverified.Note.Text, "\n")
	if len(lines) < 4 || lines[0] == "" {
		return nil, errors.New("it has not the three lines origin, size and root hash")
	}
	c := &checkpoint{origin: lines[0], root: lines[2], text: text}
	if c.size, err = strconv.ParseInt(lines[1], 10, 64); err != nil || c.size < 0 || strconv.FormatInt(c.size, 10) != lines[1] {
		return nil, fmt.Errorf("its size is %.40q", lines[1])
	}
	if root, err := base64.StdEncoding.Strict().DecodeString(lines[2]); err != nil || len(root) != 32 {
		return nil, fmt.Errorf("its root hash is %.80q", lines[2])
	}
	for _, s := range unverified.Note.UnverifiedSigs {
		if s.Name == c.origin {
			c.keys = append(c.keys, s.Hash)
		}
	}
	if len(c.keys) == 0 {
		return nil, fmt.Errorf("it is not signed by its origin %.200q", c.origin)
	}
	slices.Sort(c.keys)
	return c, nil
}

// contradicts says how another checkpoint of the same log contradicts this one: kind is for counting, and empty if it
// does not. Only one that is later may not be smaller.
func (c *checkpoint) contradicts(other *checkpoint, later bool) (kind, why string) {
	switch {
	case !slices.ContainsFunc(c.keys, func(k uint32) bool { return slices.Contains(other.keys, k) }):
		return "key", fmt.Sprintf("it is signed with key %08x; those before were with %08x", other.keys, c.keys)
	case other.size == c.size && other.root != c.root:
		return "changed", fmt.Sprintf("its root hash at size %d is %s; it was %s", c.size, other.root, c.root)
	case later && other.size < c.size:
		return "shrunk", fmt.Sprintf("it has %d entries; %d were there before", other.size, c.size)
	}
	return "", ""
}

// logs are the last checkpoints of issuance logs, by origin.
type logs map[string]*checkpoint

// seen returns what is known of logs now. What the server says in answer to a call that starts now may not be older;
// answers to calls that are under way may, for they overtake each other.
func (c *Client) seen() logs {
	c.mu.Lock()
	defer c.mu.Unlock()
	known := maps.Clone(c.checkpoints)
	if known == nil {
		known = make(logs)
	}
	return known
}

// seeCheckpoints keeps the last checkpoint of each log and raises the alarm if one contradicts what was seen before:
// then the log was rewritten, or shows different faces (decision D21). The one before is kept as evidence. known is
// what had been seen before the server spoke, and is brought up to date. The first is of the log of the server that speaks: that one
// may not be older than known. Of other servers' logs it knows what they told it some time ago.
func (c *Client) seeCheckpoints(texts []string, known logs) {
	if len(texts) > maxLogs {
		c.alarm("malformed", "the server has more issuance logs than are kept in mind", "logs", len(texts), "kept", maxLogs)
		texts = texts[:maxLogs]
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	for i, text := range texts {
		next, err := parseCheckpoint(text)
		if err != nil {
			c.alarm("malformed", "a checkpoint of an issuance log cannot be read", "reason", err.Error())
			continue
		}
		last := c.checkpoints[next.origin]
		if last == nil && len(c.checkpoints) >= maxLogs {
			c.alarm("malformed", "the server has more issuance logs than are kept in mind", "log", next.origin, "kept", maxLogs)
			continue
		}
		if c.isContradicted(next, known[next.origin], last, i == 0) {
			continue
		}
		if k := known[next.origin]; k == nil || next.size >= k.size {
			known[next.origin] = next
		}
		if last != nil && next.size < last.size { // overtaken
			continue
		}
		if c.checkpoints == nil {
			c.checkpoints = make(logs)
		}
		c.checkpoints[next.origin] = next
	}
}

// isContradicted reports, with an alarm, whether a checkpoint contradicts one that came before it, or one that came
// meanwhile. Of the server's own log none is older than what came before.
func (c *Client) isContradicted(next, before, meanwhile *checkpoint, own bool) bool {
	for _, o := range []struct {
		*checkpoint
		before bool
	}{{before, own}, {meanwhile, false}} {
		if o.checkpoint == nil {
			continue
		}
		if kind, why := o.contradicts(next, o.before); kind != "" {
			c.alarm(kind, "an issuance log contradicts what it said before; verify it with the earlier checkpoint", "log", next.origin,
				"reason", why, "earlier", o.text, "later", next.text)
			return true
		}
	}
	return false
}

func (c *Client) alarm(kind, message string, args ...any) {
	c.config.Metrics.inconsistencies.WithLabelValues(kind).Inc()
	c.config.Logger.Error(message, args...)
}

// Checkpoints returns the last checkpoint of each issuance log, as signed, in the order of their origins. They are what
// `chancery log verify --checkpoint` can hold a log against.
func (c *Client) Checkpoints() []string {
	c.mu.Lock()
	defer c.mu.Unlock()
	var out []string
	for _, k := range c.checkpoints {
		out = append(out, k.text)
	}
	slices.Sort(out)
	return out
}
