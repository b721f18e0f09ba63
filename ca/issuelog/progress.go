package issuelog

import "time"

// Progress is how far a log has got, for who looks after it.
type Progress struct {
	Size       int64     // entries, those on their way into the tree included
	Covered    int64     // of which the last checkpoint covers so many
	Checkpoint time.Time // when that was made
	Sequenced  time.Time // when all entries were last covered; zero before
	Err        error     // why entries cannot be written; nil if they can
	Failed     error     // why the last checkpoint could not be made; nil if it was
}

// note takes down that a checkpoint covers all entries there were.
func (p *Progress) note(size int64, now time.Time) {
	if size != p.Covered {
		p.Checkpoint = now
	}
	p.Covered, p.Sequenced = size, now
}

// Progress returns how far the log has got. It does not wait for the disk.
func (l *Log) Progress() Progress {
	l.mu.Lock()
	defer l.mu.Unlock()
	p := l.progress
	p.Size, p.Err, p.Failed = l.next, l.refuses(), l.sequenceFail
	return p
}
