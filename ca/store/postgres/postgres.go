// Package postgres owns the shared store in a PostgreSQL database: document, notes and lease are rows, changes are told by
// NOTIFY, and the lease goes by the database's clock. It asks for one statement for each call, which is a transaction of its
// own, and so needs no rights but to read and write those rows once the tables are there (docs/postgres.md).
//
// It refuses to wait for ever: each call has an end, whether the database hangs or the network does. It refuses connections that
// somebody on the way can read or change, unless the URL says so; databases whose tables a newer version made; and standbys,
// which may be behind.
package postgres

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/chancery-project/chancery/ca/store"
)

const (
	callTimeout  = 10 * time.Second // of a call, whatever it takes
	pingTimeout  = 3 * time.Second  // of the look at a connection that was idle, before it is used
	closeTimeout = 2 * time.Second  // of saying goodbye
	keepAlive    = 15 * time.Second // after which a silent connection of Watch is asked whether it lives
)

// Store is the document in a PostgreSQL database.
type Store struct {
	target target
	pool   *pgxpool.Pool
	log    *slog.Logger

	sql statements

	callTimeout, keepAlive time.Duration // tests have less of both

	closing sync.Once
	closed  chan struct{} // closed by Close
}

var _ store.Store = (*Store)(nil)

// Open opens what Create made. ErrMissing if the database has no tables of ours. It makes nothing, but for changes of tables that
// an older version made.
func Open(ctx context.Context, c Config) (*Store, error) { return open(ctx, c, (*Store).upgrade) }

// Create opens a database, and makes schema and tables if they are not there, for which the role needs the right to.
func Create(ctx context.Context, c Config) (*Store, error) { return open(ctx, c, (*Store).migrate) }

func open(ctx context.Context, c Config, prepare func(*Store, context.Context) error) (*Store, error) {
	t, err := c.parse()
	if err != nil {
		return nil, fmt.Errorf("postgres: %w", err)
	}
	s := &Store{target: t, log: slog.New(slog.DiscardHandler), sql: newStatements(t), callTimeout: callTimeout, keepAlive: keepAlive, closed: make(chan struct{})}
	pc, err := t.poolConfig()
	if err == nil {
		pc.BeforeConnect = func(_ context.Context, cc *pgx.ConnConfig) error {
			now, err := t.connConfig()
			if err == nil {
				*cc = *now
			}
			return err
		}
		pc.AfterConnect = keepsWhatItConfirms
		s.pool, err = pgxpool.NewWithConfig(ctx, pc)
	}
	if err != nil {
		return nil, fmt.Errorf("opening %s: %w", t.name, err)
	}
	if err := s.call(ctx, "opening", func(ctx context.Context) error { return prepare(s, ctx) }); err != nil {
		s.Close()
		return nil, err
	}
	return s, nil
}

// LogTo has Watch log that it fails, and that it works again. It is called before Watch.
func (s *Store) LogTo(log *slog.Logger) { s.log = log }

// keepsWhatItConfirms sees to it that what is confirmed is on disk, whatever the database's default: a change that a crash
// takes back would be a step back to an older document.
func keepsWhatItConfirms(ctx context.Context, c *pgx.Conn) error {
	_, err := c.Exec(ctx, `SELECT set_config('synchronous_commit', 'on', false) WHERE current_setting('synchronous_commit') = 'off'`)
	return err
}

// call runs f with an end: ctx's, that of a call, or Close. Its error names the store.
func (s *Store) call(ctx context.Context, doing string, f func(context.Context) error) error {
	limited, cancel := context.WithTimeout(ctx, s.callTimeout)
	defer cancel()
	stop := make(chan struct{})
	defer close(stop)
	go func() {
		select {
		case <-s.closed:
			cancel()
		case <-stop:
		}
	}()
	err := ctx.Err()
	if s.isClosed() {
		err = store.ErrClosed
	} else if err == nil {
		err = f(limited)
	}
	switch {
	case err == nil:
		return nil
	case errors.Is(err, store.ErrConflict) || errors.Is(err, store.ErrMissing):
	case s.isClosed():
		err = store.ErrClosed
	case ctx.Err() != nil && !errors.Is(err, ctx.Err()):
		err = fmt.Errorf("%w (%w)", ctx.Err(), err)
	case ctx.Err() == nil && limited.Err() != nil:
		err = fmt.Errorf("it has not answered within %s: %w", s.callTimeout, err)
	}
	return fmt.Errorf("%s %s: %w", doing, s.target.name, explain(err))
}

// isClosed says whether Close was called.
func (s *Store) isClosed() bool {
	select {
	case <-s.closed:
		return true
	default:
		return false
	}
}

// explained is an error on one line, with what to do about it.
type explained struct {
	error
	hint string
}

func (e explained) Error() string {
	return strings.Join(strings.Fields(e.error.Error()), " ") + e.hint
}

func (e explained) Unwrap() error { return e.error }

// explain adds to an error of PostgreSQL what an operator would have to look up. The library's errors hold no password.
func explain(err error) error {
	var pg *pgconn.PgError
	hint := ""
	if errors.As(err, &pg) {
		switch pg.Code {
		case "42501": // insufficient_privilege
			hint = "; docs/postgres.md has the rights that a role needs"
		case "28P01", "28000": // invalid_password, invalid_authorization_specification
			hint = "; look at url, passwordFile and the database's pg_hba.conf"
		case "25006": // read_only_sql_transaction
			hint = "; it is a standby, or was made read-only"
		}
	}
	return explained{err, hint}
}

// Close ends all calls and connections. Where the database does not answer, it does not wait for that.
func (s *Store) Close() error {
	s.closing.Do(func() {
		close(s.closed)
		done := make(chan struct{})
		go func() {
			s.pool.Close()
			close(done)
		}()
		select {
		case <-done:
		case <-time.After(closeTimeout):
		}
	})
	return nil
}

// statements are all that we ever send, with the schema's name in them.
type statements struct {
	load, create, replace                                     string
	hold, giveUp                                              string
	updateNote, lockNotes, countNotes, insertNote, drop, list string
	listen, version                                           string
}

// newStatements: a change and the word of it are one statement, and so one transaction.
func newStatements(t target) statements {
	in := func(s string) string {
		return strings.NewReplacer("@schema", pgx.Identifier{t.schema}.Sanitize(), "@channel", t.channel(),
			"@most", strconv.Itoa(store.MaxNotes), "@document", strconv.Itoa(store.MaxDocument), "@note", strconv.Itoa(store.MaxNote)).Replace(s)
	}
	told := func(change string) string {
		return in(`WITH changed AS (` + change + ` RETURNING 1) SELECT pg_notify('@channel', '') FROM changed`)
	}
	return statements{
		load:    in(`SELECT version, octet_length(data), CASE WHEN octet_length(data) <= @document THEN data END FROM @schema.document WHERE id = 1`),
		create:  told(`INSERT INTO @schema.document (id, version, data) VALUES (1, $1, $2) ON CONFLICT DO NOTHING`),
		replace: told(`UPDATE @schema.document SET version = $1, data = $2 WHERE id = 1 AND version = $3`),
		// Who only asks writes nothing: now is what there was before. What two take at once, one has, by the row's lock.
		hold: in(`WITH now AS (SELECT holder, holder <> $1 AND until > clock_timestamp() AS taken FROM @schema.lease WHERE id = 1),
			new AS (INSERT INTO @schema.lease AS l (id, holder, until)
				SELECT 1, $1, clock_timestamp() + $2 * interval '1 millisecond' WHERE NOT EXISTS (SELECT FROM now WHERE taken)
				ON CONFLICT (id) DO UPDATE SET holder = excluded.holder, until = clock_timestamp() + $2 * interval '1 millisecond'
				WHERE l.holder = excluded.holder OR l.until <= clock_timestamp() RETURNING holder)
			SELECT holder, true, false FROM new UNION ALL SELECT holder, false, taken FROM now WHERE NOT EXISTS (SELECT FROM new)`),
		giveUp:     in(`DELETE FROM @schema.lease WHERE id = 1 AND holder = $1`),
		updateNote: told(`UPDATE @schema.note SET data = $2 WHERE replica = $1`),
		lockNotes:  in(`LOCK TABLE @schema.note IN SHARE ROW EXCLUSIVE MODE`),
		countNotes: in(`SELECT count(*) FROM @schema.note WHERE replica <> $1`),
		insertNote: told(`INSERT INTO @schema.note (replica, data) VALUES ($1, $2) ON CONFLICT (replica) DO UPDATE SET data = excluded.data`),
		drop:       told(`DELETE FROM @schema.note WHERE replica = $1`),
		list:       in(`SELECT left(replica, 300), octet_length(data), CASE WHEN octet_length(data) <= @note THEN data END FROM @schema.note LIMIT @most + 1`),
		listen:     in(`LISTEN @channel`),
		version:    in(`SELECT version FROM @schema.schema_version`),
	}
}

// asBytes is how what may be large is asked for: as bytes, not as text, which would be twice as long.
const asBytes = pgx.QueryExecModeDescribeExec
