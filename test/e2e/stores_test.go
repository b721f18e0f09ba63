package e2e

import (
	"bytes"
	"compress/gzip"
	"context"
	"errors"
	"fmt"
	"io"
	"slices"
	"strconv"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"

	"github.com/chancery-project/chancery/ca/store/postgres/pgtest"
)

// postgresStore is a PostgreSQL of the test's own, in which a trigger keeps each document.
func postgresStore(t *testing.T) *sharedStore {
	t.Helper()
	c := pgtest.New(t)
	c.Exec(t, "postgres", `CREATE ROLE chancery LOGIN`)
	db := c.Database(t)
	c.Exec(t, "postgres", `GRANT CREATE ON DATABASE `+db+` TO chancery`)
	state := map[string]any{"postgres": map[string]any{"url": c.URL(db, "chancery")}}
	query := func(f func(context.Context, *pgx.Conn) error) {
		t.Helper()
		conn := c.Connect(t, db, pgtest.Admin)
		defer conn.Close(context.Background())
		if err := f(context.Background(), conn); err != nil {
			t.Fatal(err)
		}
	}
	return &sharedStore{
		state: state, init: state,
		record: func() {
			c.Exec(t, db, `CREATE TABLE history (n bigserial PRIMARY KEY, version bigint, data bytea)`,
				`CREATE FUNCTION keep() RETURNS trigger LANGUAGE plpgsql SECURITY DEFINER AS $$ BEGIN
					INSERT INTO public.history (version, data) VALUES (NEW.version, NEW.data); RETURN NEW; END $$`,
				`INSERT INTO history (version, data) SELECT version, data FROM chancery.document`,
				`CREATE TRIGGER keep AFTER INSERT OR UPDATE ON chancery.document FOR EACH ROW EXECUTE FUNCTION keep()`)
		},
		history: func() (all []kept) {
			query(func(ctx context.Context, conn *pgx.Conn) error {
				rows, err := conn.Query(ctx, `SELECT version, data FROM history ORDER BY n`)
				if err != nil {
					return err
				}
				for rows.Next() {
					var k kept
					if err := rows.Scan(&k.version, &k.data); err != nil {
						return err
					}
					all = append(all, k)
				}
				return rows.Err()
			})
			return all
		},
		holder: func() (name string) {
			query(func(ctx context.Context, conn *pgx.Conn) error {
				err := conn.QueryRow(ctx, `SELECT holder FROM chancery.lease WHERE until > now()`).Scan(&name)
				if errors.Is(err, pgx.ErrNoRows) {
					return nil
				}
				return err
			})
			return name
		},
		crash: c.Kill, restart: func() { c.Start(t) }, postgres: c, database: db,
	}
}

// kubernetesStore is an API server of the test's own, whose watch shows each document. The servers have the rights that the
// state needs, and no others.
func kubernetesStore(t *testing.T) *sharedStore {
	t.Helper()
	k := StartKube(t)
	const name = "chancery-state"
	ns := k.Namespace(t, "state")
	names := func(kinds, group string, verbs []string, names ...string) rbacv1.PolicyRule {
		return rbacv1.PolicyRule{APIGroups: []string{group}, Resources: []string{kinds}, ResourceNames: names, Verbs: verbs}
	}
	server := k.KubeconfigFor(t, ns, "server", names("secrets", "", []string{"get", "watch", "patch"}, name, name+"-notes"),
		names("leases", "coordination.k8s.io", []string{"get", "patch"}, name))
	state := func(kubeconfig string) map[string]any {
		return map[string]any{"kubernetes": map[string]any{"namespace": ns, "name": name, "kubeconfig": kubeconfig}}
	}
	w := &secretHistory{t: t, k: k, namespace: ns, name: name}
	return &sharedStore{
		state: state(server), init: state(k.AdminKubeconfig), record: w.start, history: w.all,
		holder: func() string {
			l, err := k.Client.CoordinationV1().Leases(ns).Get(t.Context(), name, metav1.GetOptions{})
			if err != nil {
				t.Fatal(err)
			}
			if s := l.Spec; s.HolderIdentity != nil && s.RenewTime != nil && s.LeaseDurationSeconds != nil &&
				time.Now().Before(s.RenewTime.Add(time.Duration(*s.LeaseDurationSeconds)*time.Second)) {
				return *s.HolderIdentity
			}
			return ""
		},
		crash: k.APIServer().Kill, restart: func() { k.RestartAPIServer(t) },
	}
}

// secretHistory follows the Secret of the document.
type secretHistory struct {
	t               *testing.T
	k               *Kube
	namespace, name string

	mu   sync.Mutex // guards kept
	kept []kept
}

func (w *secretHistory) start() {
	w.t.Helper()
	ctx, cancel := context.WithCancel(context.Background())
	at, err := w.now(ctx)
	if err != nil {
		w.t.Fatal(err)
	}
	var wg sync.WaitGroup
	wg.Go(func() { w.follow(ctx, at) })
	w.t.Cleanup(func() { cancel(); wg.Wait() })
}

// now keeps the present document, and returns where to watch from.
func (w *secretHistory) now(ctx context.Context) (at string, err error) {
	s, err := w.k.Client.CoreV1().Secrets(w.namespace).Get(ctx, w.name, metav1.GetOptions{})
	if err == nil {
		w.keep(s)
	}
	return s.ResourceVersion, err
}

// follow watches. An API server that starts anew does not know what was before: then it goes on from the present document.
// More than one that was missed shows as a hole in the history.
func (w *secretHistory) follow(ctx context.Context, at string) {
	for ctx.Err() == nil {
		events, err := w.k.Client.CoreV1().Secrets(w.namespace).Watch(ctx, metav1.ListOptions{
			FieldSelector: fields.OneTermEqualSelector("metadata.name", w.name).String(), ResourceVersion: at,
		})
		if err != nil {
			time.Sleep(pollEvery)
			continue
		}
		for e := range events.ResultChan() {
			s, ok := e.Object.(*corev1.Secret)
			if !ok {
				if err := apierrors.FromObject(e.Object); apierrors.IsResourceExpired(err) || apierrors.IsGone(err) {
					if again, err := w.now(ctx); err == nil {
						at = again
					}
				} else if ctx.Err() == nil && !apierrors.IsInternalError(err) {
					w.t.Errorf("watching the document: %v", err)
				}
				break
			}
			at = s.ResourceVersion
			w.keep(s)
		}
		events.Stop()
	}
}

// keep notes a document, once.
func (w *secretHistory) keep(s *corev1.Secret) {
	version, err := strconv.ParseUint(string(s.Data["version"]), 10, 64)
	if err != nil {
		w.t.Errorf("the Secret's version: %v", err)
		return
	}
	z, err := gzip.NewReader(bytes.NewReader(s.Data["document.gz"]))
	if err != nil {
		w.t.Error(err)
		return
	}
	data, err := io.ReadAll(z)
	if err != nil {
		w.t.Error(err)
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	if n := len(w.kept); n == 0 || w.kept[n-1].version != version || !bytes.Equal(w.kept[n-1].data, data) {
		w.kept = append(w.kept, kept{version, data})
	}
}

// all returns what was kept, once it has what the API server has now.
func (w *secretHistory) all() []kept {
	w.t.Helper()
	Eventually(w.t, 30*time.Second, "the watch has brought all documents", func() error {
		s, err := w.k.Client.CoreV1().Secrets(w.namespace).Get(w.t.Context(), w.name, metav1.GetOptions{})
		if err != nil {
			return err
		}
		w.mu.Lock()
		defer w.mu.Unlock()
		if last := w.kept[len(w.kept)-1].version; string(s.Data["version"]) != fmt.Sprint(last) {
			return fmt.Errorf("it has version %d, the API server %s", last, s.Data["version"])
		}
		return nil
	})
	w.mu.Lock()
	defer w.mu.Unlock()
	return slices.Clone(w.kept)
}
